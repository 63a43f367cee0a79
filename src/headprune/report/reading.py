"""From what was found in folders to the runs that are shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from headprune.checkpoint import sweeps
from headprune.errors import CheckpointError
from headprune.report.charts import short_name
from headprune.report.discovery import (
    Found,
    GatesFolder,
    ResultFolder,
    ScoresFolder,
    gates_of,
    settings_in,
)
from headprune.report.evidence import map_of_gates, map_of_result, map_of_scores
from headprune.report.histories import history
from headprune.report.lineage import Made
from headprune.report.view import Evaluation, Facts, Point, Run, Sweep
from headprune.tensors.units import Unit

_UNIT = {
    Unit.HEAD: "one by one",
    Unit.KV_GROUP: "a KV head with its queries at a time",
    Unit.QUERY_SLOT: "a query of every KV head at a time",
}


def assemble(found: Sequence[Found], evaluations: Mapping[Path, Evaluation]) -> list[Run]:
    """The runs: one per result that nothing else was made of, with the parts that belong to it.

    Gates, scores and evaluations of no result are runs of their own.

    Args:
        found: What lies in each place that was asked for, in order.
        evaluations: The evaluations in there, by their files.

    Raises:
        CheckpointError: If an evaluation is not of the result it names, or a part is damaged.
    """
    tips = [(place, tip) for place in found for tip in place.tips]
    measured = _owners(found, tips, evaluations)
    runs: list[tuple[Path, Run]] = []
    used: set[Path] = {file for files in measured.values() for file in files}
    for place in found:
        for tip in place.tips:
            chain = [*_steps(place, tip), tip]
            near = [*place.gates, *(g for f in found if f is not place for g in f.gates)]
            gates = next((g for r in chain if (g := gates_of(r, near))), None)
            scores = next((s for s in _scores(place, found) if _same_model(s, chain)), None)
            used |= {part.path for part in (gates, scores) if part is not None}
            mine = [evaluations[file] for file in measured.get(tip.path, ())]
            runs.append((place.place, _result_run(place, chain, gates, scores, mine)))
    for place in found:
        for gates in place.gates:
            if gates.path not in used:
                runs.append((gates.path, _gates_run(gates)))
        for folder, swept in place.sweeps.items():
            inside = next((s for s in place.scores if s.path.parent == folder), None)
            used |= {inside.path} if inside is not None else set()
            runs.append((folder, _sweep_run(folder, swept, inside)))
        for scores in place.scores:
            if scores.path not in used:
                runs.append((scores.path, _scores_run(scores)))
        for file in place.reports:
            if file not in used:
                runs.append((file, _evaluation_run(evaluations[file])))
    return _named(runs)


def _named(runs: Sequence[tuple[Path, Run]]) -> list[Run]:
    """Short names where they tell runs apart, and paths where they do not."""
    names = [place.resolve().name for place, _ in runs]
    for paths in ([str(run.folder) for _, run in runs], [str(r.folder.resolve()) for _, r in runs]):
        count = Counter(names)
        names = [p if count[n] > 1 else n for n, p in zip(names, paths, strict=True)]
    return [replace(run, name=name) for name, (_, run) in zip(names, runs, strict=True)]


def _owners(
    found: Sequence[Found],
    tips: Sequence[tuple[Found, ResultFolder]],
    evaluations: Mapping[Path, Evaluation],
) -> dict[Path, list[Path]]:
    """Per result, the evaluations that belong to it, its own first."""
    own: dict[Path, list[Path]] = {}
    more: dict[Path, list[Path]] = {}
    for place in found:
        for file in place.reports:
            evaluation = evaluations[file]
            named = [tip for _, tip in tips if _is(tip, evaluation)]
            here = [tip for tip in place.tips if tip.path.name == Path(evaluation.model).name]
            elsewhere = [t for _, t in tips if t.path.resolve().name == Path(evaluation.model).name]
            chosen = named or here or (elsewhere if len(elsewhere) == 1 else [])
            if chosen:
                _check_size(file, evaluation, chosen[0])
                own.setdefault(chosen[0].path, []).append(file)
            elif len(place.tips) == 1:  # the folder was renamed, or it measures a step before
                (tip,) = place.tips
                fits = evaluation.size.query_heads == tip.manifest.query_heads[1]
                (own if fits else more).setdefault(tip.path, []).append(file)
    newest = {path: sorted(files, key=_written, reverse=True) for path, files in own.items()}
    return {path: [*newest.get(path, ()), *more.get(path, ())] for path in {**newest, **more}}


def _written(file: Path) -> float:
    return file.stat().st_mtime


def _is(tip: ResultFolder, evaluation: Evaluation) -> bool:
    return Path(evaluation.model).resolve() == tip.path.resolve()


def _check_size(file: Path, evaluation: Evaluation, tip: ResultFolder) -> None:
    heads = evaluation.size.query_heads
    if heads != tip.manifest.query_heads[1]:
        raise CheckpointError(
            f"'{file}' measured a model with {heads} query heads under the name "
            f"'{evaluation.model}', but '{tip.path}' has {tip.manifest.query_heads[1]}: evaluate "
            "it again, or remove the old report."
        )


def _steps(place: Found, tip: ResultFolder) -> list[ResultFolder]:
    """The results of the same place that it was made of, oldest first."""
    by_key = {result.key: result for result in place.results}
    before = [by_key.get(step.key) for step in tip.chain[:-1]]
    return [result for result in before if result is not None]


def _scores(place: Found, found: Iterable[Found]) -> list[ScoresFolder]:
    return [*place.scores, *(s for other in found if other is not place for s in other.scores)]


def _same_model(scores: ScoresFolder, chain: Sequence[ResultFolder]) -> bool:
    return scores.metadata.model.fingerprint in {
        result.manifest.source.fingerprint for result in chain
    }


def _result_run(
    place: Found,
    chain: Sequence[ResultFolder],
    gates: GatesFolder | None,
    scores: ScoresFolder | None,
    evaluations: Sequence[Evaluation],
) -> Run:
    tip, first = chain[-1], chain[0]
    histories = [*([history(gates.path / "history.jsonl", "gates")] if gates else [])]
    histories += [history(r.path / "heal.jsonl", "heal") for r in chain]
    return Run(
        name=place.place.name,
        folder=tip.path,
        source=tip.chain[0].source.name,
        asked=" ".join(_asked(step, gates) for step in tip.chain),
        manifest=tip.manifest,
        chain=tip.chain,
        settings=_settings(gates),
        head_map=map_of_result(first, tip, gates, scores),
        histories=tuple(h for h in histories if h is not None),
        evaluations=tuple(evaluations),
        provenance=_provenance(tip),
    )


def _asked(made: Made, gates: GatesFolder | None) -> str:
    """What one command was asked for, by the record it left."""
    if made.healing is not None:
        teacher = short_name(made.healing.teacher)
        return f"Train for {made.healing.steps} steps to match {teacher}."
    if made.sharing is not None:
        sharing, (before, after) = made.sharing, made.kv_heads
        tokens = sharing.calibration_tokens
        text = f", calibrated on {tokens:,} tokens" if tokens else ""
        share = "neighbours share" if sharing.grouping == "adjacent" else "similar ones share"
        return f"Merge {before} KV heads into {after} ({sharing.merge}; {share}){text}."
    before, after = made.query_heads
    trained = None if gates is None else gates.trained.metadata
    fingerprint = made.source.fingerprint
    if gates is not None and trained is not None and trained.model.fingerprint == fingerprint:
        wanted = before - trained.query_heads + trained.kept_heads
        again = "" if wanted == after else f" Cut to {after} of {before} instead."
        return asked_of_gates(gates) + again
    return f"Cut {before - after or 'none'} of {before} query heads, as a plan says."


def asked_of_gates(gates: GatesFolder) -> str:
    """What train-gates was asked for."""
    metadata, settings = gates.trained.metadata, gates.settings
    target, penalty, kinds = settings.target_heads, settings.l0_penalty, settings.attention
    total, data = metadata.query_heads, short_name(metadata.data)
    if penalty is not None:
        goal = f"Remove of {total} query heads as many as a penalty of {penalty} per open head pays"
    elif isinstance(target, float):
        goal = f"Keep {100 * target:.4g}% of all query heads ({metadata.kept_heads} of {total})"
    else:
        goal = f"Keep {metadata.kept_heads} of {total} query heads"
    goal += f" of the {' and '.join(kinds)}" if kinds else ""
    return (
        f"{goal}, {_UNIT[metadata.unit]}; gates trained for {metadata.steps} steps "
        f"({metadata.objective}) on {data}."
    )


def _settings(gates: GatesFolder | None) -> Facts:
    if gates is None:
        return ()
    settings = gates.settings.model_dump(exclude={"schema_version"}, exclude_unset=True)
    return tuple((name.replace("_", " "), str(v)) for name, v in settings.items() if v is not None)


def _provenance(tip: ResultFolder) -> Facts:
    manifest = tip.manifest
    source = manifest.source
    return (
        ("written", manifest.created),
        ("source", f"{source.name} ({source.architecture}, fingerprint {source.fingerprint})"),
        *((f"{name} version", version) for name, version in manifest.versions.items()),
        ("files", f"{len(manifest.files)} with their SHA-256 in headprune.json"),
    )


def _gates_run(gates: GatesFolder) -> Run:
    metadata = gates.trained.metadata
    trained = history(gates.path / "history.jsonl", "gates")
    return Run(
        name=gates.path.name,
        folder=gates.path,
        source=metadata.model.name,
        asked=asked_of_gates(gates),
        manifest=None,
        chain=(),
        settings=_settings(gates),
        head_map=map_of_gates(gates),
        histories=(trained,) if trained is not None else (),
        evaluations=(),
        provenance=(
            ("source", f"{metadata.model.name} (fingerprint {metadata.model.fingerprint})"),
            ("headprune version", metadata.headprune_version),
        ),
    )


def _scores_run(scores: ScoresFolder) -> Run:
    metadata = scores.metadata
    names = ", ".join(scores.scores)
    return Run(
        name=scores.path.name,
        folder=scores.path,
        source=metadata.model.name,
        asked=f"Score the heads of {metadata.model.name} by {names}.",
        manifest=None,
        chain=(),
        settings=(),
        head_map=map_of_scores(scores),
        histories=(),
        evaluations=(),
        provenance=tuple((f"{n} version", v) for n, v in metadata.versions.items()),
    )


def _sweep_run(folder: Path, swept: sweeps.Sweep, scores: ScoresFolder | None) -> Run:
    def point(p: sweeps.Point) -> Point:
        series = f"{p.criterion}{' with refit' if p.refit else ''}"
        return Point(series, p.keep, p.query_heads, p.parameters, p.quality)

    points = tuple(point(p) for p in swept.points)
    shares = ", ".join(f"{100 * keep:.4g}%" for keep in sorted({p.keep for p in points}))
    source = scores.metadata.model.name if scores is not None else folder.resolve().name
    settings = settings_in(folder / "config.yaml")
    return Run(
        name=folder.name,
        folder=folder,
        source=source,
        asked=f"Measure {len(points)} cuts of {source}: {shares} of its heads, by "
        f"{', '.join(dict.fromkeys(p.series for p in points))}.",
        manifest=None,
        chain=(),
        settings=tuple((name, str(v)) for name, v in settings.items() if v is not None),
        head_map=None if scores is None else map_of_scores(scores),
        histories=(),
        evaluations=(),
        provenance=(),
        sweep=Sweep(swept.metric, swept.higher_is_better, point(swept.base), points),
    )


def _evaluation_run(evaluation: Evaluation) -> Run:
    against = f" against {evaluation.base}" if evaluation.base else ""
    return Run(
        name=evaluation.file.name,
        folder=evaluation.file,
        source=evaluation.base or evaluation.model,
        asked=f"Measure {evaluation.model}{against} on {short_name(evaluation.data)}.",
        manifest=None,
        chain=(),
        settings=(),
        head_map=None,
        histories=(),
        evaluations=(evaluation,),
        provenance=(),
    )
