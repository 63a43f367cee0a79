"""headprune sweep: quality against size, for several criteria and budgets, in one run.

sweep.json      every point, and which of them no other beats
points/         one file per point; what is there already is not measured again
scores/         the scores
curve.svg/png   the plot
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headprune.config import (
    CalibrationConfig,
    DataConfig,
    EvaluateConfig,
    LayoutOption,
    PlanConfig,
    ScoreConfig,
    SweepConfig,
)
from headprune.context import Context
from headprune.data.read import read_examples, refuse_missing_file
from headprune.errors import CheckpointError, PlanError
from headprune.evaluation.evaluate import evaluate
from headprune.evaluation.metrics import METRICS
from headprune.evaluation.report import Metric, ModelReport
from headprune.evidence.criteria import CRITERIA
from headprune.evidence.score import score
from headprune.exporting.prune import prune
from headprune.io import ownership
from headprune.io.figures import Series, curve, pareto, save
from headprune.io.outputs import Input, claimed, whole_folder
from headprune.io.parsing import read_as, read_yaml
from headprune.io.writing import reserved, write_whole, write_yaml
from headprune.model.batch import usable_length
from headprune.model.loading import load_tokenizer, task_of
from headprune.model.open import load
from headprune.planning.from_evidence import CutRequest
from headprune.planning.plan import plan
from headprune.schemas.manifest import versions
from headprune.schemas.scores import read_scores
from headprune.schemas.sweeps import SWEEP, Point, Sweep

# of what a task measures, the number that the curve is drawn of
MAIN = tuple(name for name, spec in METRICS.items() if spec.leads)


def sweep(
    model: str | Path,
    data: DataConfig,
    output: Path,
    config: SweepConfig,
    test: DataConfig | Mapping[str, DataConfig] | None = None,
    overwrite: bool = False,
    context: Context = Context(),
) -> Sweep:
    """Scores, cuts and measures a model at several sizes.

    A sweep that was stopped goes on where it was, if it is called with the same settings,
    on the same texts and by the same versions.

    Args:
        model: Folder or hub id.
        data: Calibration data, for scores and refits.
        output: Folder for the results.
        config: How it is cut, and measured.
        test: Data to measure on; None for the calibration data. Of several, by name, the first
            decides; metrics of the others carry their names.
        overwrite: Start anew in an existing ``output``.
        context: What it runs in.

    Raises:
        HeadpruneError: If the input does not fit together, or ``output`` is another sweep's.
    """
    evaluation = config.part(EvaluateConfig, speed=False)
    scoring, calibration = config.part(ScoreConfig), config.part(CalibrationConfig)
    test, criteria = test or data, config.criterion
    _refuse(criteria)
    tests = [test] if isinstance(test, DataConfig) else list(test.values())
    further = {} if isinstance(test, DataConfig) else dict(list(test.items())[1:])
    for each in (data, *tests):
        refuse_missing_file(each.source)
    inputs = (model, data.source, *(one.source for one in tests))
    with _room(output, overwrite, inputs) as place:
        net, source = load(model, config.dtype, context.allowed)
        tokenizer = load_tokenizer(model, trust_remote_code=context.allowed.trust_remote_code)
        length = usable_length(net.config, tokenizer, evaluation.seq_len)
        evaluation = evaluation.model_copy(update={"seq_len": length})
        # models without a head are measured against the whole one, also that one itself
        against = model if task_of(net) == "features" else None
        del net
        settings = {
            "model": str(model),
            "fingerprint": source.fingerprint,
            "versions": versions(),
            "data": _told(data),
            "test": _told(tests[0]),
            "further": {name: _told(one) for name, one in further.items()} or None,
            "unit": config.unit and config.unit.value,
            "refit": config.refit,
            "calibration": calibration.model_dump(mode="json"),
            "evaluation": evaluation.model_dump(mode="json"),
        }
        _prepare(place, settings)
        folder, unheard = place / "scores", context.unheard()
        if not folder.is_dir() or set(read_scores(folder).scores) != set(criteria):
            score(model, folder, scoring, data, overwrite=True, context=context)
        asked = [(name, share) for name in criteria for share in config.keep]

        def cut(name: str, criterion: str, share: float) -> Point:
            with reserved(place / "cut") as scratch:
                target: str | Path = model
                if criterion:
                    target = scratch
                    budget = config.part(PlanConfig, keep=share, criterion=criterion)
                    planned = plan(model, folder, budget, context=unheard)
                    request = CutRequest(plan=planned.plan, layout=LayoutOption.RAGGED)
                    text = data if config.refit else None
                    prune(model, scratch, request, text, calibration, context=unheard)
                report = evaluate(target, test, evaluation, against=against, context=unheard)
            return _point(name, criterion, share, config.refit and bool(criterion), report.model)

        def at(number: int, criterion: str, share: float) -> Point:
            suffix = "-refit" if config.refit else ""
            name = f"{criterion}-{share:g}{suffix}" if criterion else "whole"
            context.stage(
                f"point {number} of {len(asked)}: {name}" if number else "the whole model"
            )
            context.whole(number, len(asked) + 1)
            path = place / "points" / f"{name}.json"
            if not path.is_file():
                point = cut(name, criterion, share)
                write_whole(path, point.model_dump_json(indent=2) + "\n")
            return read_as(Point, path)

        whole = at(0, "", 1.0)
        points = [at(n + 1, name, share) for n, (name, share) in enumerate(asked)]
        result = _conclude(whole, points, read_scores(folder).id)
        write_whole(place / SWEEP, result.model_dump_json(indent=2) + "\n")
        _draw(result, place, Path(model).name)
        return result


@contextmanager
def _room(output: Path, overwrite: bool, inputs: Sequence[Input]) -> Iterator[Path]:
    """Yields where to write: the folder itself, or what will replace an existing one whole."""
    begun = not overwrite and ownership.SWEEP.content(output) is not None
    with claimed(output, overwrite, inputs, goes_on=begun):
        if overwrite and output.is_dir() and any(output.iterdir()):
            with whole_folder(output) as new:
                yield new
        else:
            fresh = not output.exists()
            try:
                yield output
            except BaseException:
                if fresh and not any((output / "points").glob("*.json")):  # nothing to go on from
                    shutil.rmtree(output, ignore_errors=True)
                raise


def _refuse(criteria: Sequence[str]) -> None:
    """Refuses what would fail after hours, before anything is touched.

    Raises:
        PlanError: If a criterion is unknown, or is none that a sweep can use.
    """
    for name in criteria:
        if "gates" in CRITERIA[name].needs:
            raise PlanError("A sweep has no trained gates; use another criterion than gates.")


def _told(data: DataConfig) -> dict[str, Any]:
    """Where a text comes from, and which it is."""
    return {**data.model_dump(mode="json"), "sha256": read_examples(data).sha256}


def _prepare(output: Path, settings: dict[str, Any]) -> None:
    path = output / "config.yaml"
    begun = (output / "points").is_dir() and any((output / "points").iterdir())
    if path.is_file() and begun:
        before = read_yaml(path)
        known = before if isinstance(before, dict) else {}
        changed = [name for name in settings if known.get(name) != settings[name]]
        if changed:
            raise CheckpointError(
                f"The sweep in '{output}' was started with other settings "
                f"({', '.join(changed)}). Go on with the same ones, or start anew with --overwrite."
            )
        return
    try:
        for name in ("points", "scores"):
            shutil.rmtree(output / name, ignore_errors=True)
        for name in ("sweep.json", "curve.svg", "curve.png"):
            (output / name).unlink(missing_ok=True)
        output.mkdir(parents=True, exist_ok=True)
        write_yaml(settings, path)
    except OSError as error:
        raise CheckpointError(f"Could not write '{output}': {error}.") from None


def _point(name: str, criterion: str, share: float, refit: bool, report: ModelReport) -> Point:
    main = _main(report.metrics)
    return Point(
        name=name,
        measured=report.id,
        task=report.task,
        criterion=criterion,
        keep=share,
        refit=refit,
        query_heads=report.cost.query_heads,
        kv_heads=report.cost.kv_heads,
        parameters=report.cost.parameters,
        quality=main.value,
        metrics={each.name: each.value for each in report.metrics},
    )


def _main(found: Sequence[Metric]) -> Metric:
    by_name = {each.name: each for each in found}
    return next(by_name[name] for name in MAIN if name in by_name)


def _conclude(base: Point, points: Sequence[Point], scores: str) -> Sweep:
    metric = next((name for name in MAIN if name in base.metrics), None)
    if metric is None:
        raise CheckpointError(
            f"The point '{base.name}' is damaged: it has no {', '.join(MAIN)}. Remove its file, "
            "and it is measured again."
        )
    higher = METRICS[metric].higher_is_better
    best = pareto([(float(p.parameters), p.quality) for p in points], higher)
    return Sweep(
        metric=metric,
        higher_is_better=higher,
        base=base,
        points=tuple(points),
        front=tuple(points[i].name for i in best),
        scores=scores,
    )


def _draw(result: Sweep, output: Path, name: str) -> None:
    millions = [p.parameters / 1e6 for p in result.points]
    series = []
    for criterion in dict.fromkeys(p.criterion for p in result.points):
        own = [i for i, p in enumerate(result.points) if p.criterion == criterion]
        series.append(
            Series(
                criterion,
                [millions[i] for i in own],
                [result.points[i].quality for i in own],
            )
        )
    figure = curve(
        series,
        f"{name}: quality against size",
        x_label="parameters, millions",
        y_label=result.metric.replace("_", " "),
        baseline=result.base.quality,
        higher_is_better=result.higher_is_better,
    )
    for suffix in (".svg", ".png"):
        save(figure, output / f"curve{suffix}")
