"""headprune evaluate: quality, size and speed, also against another model."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headprune.config import DataConfig, EvaluateConfig
from headprune.context import Context
from headprune.errors import DataError, HeadpruneWarning
from headprune.evaluation.comparison import bootstrap
from headprune.evaluation.loaded import Loaded, load
from headprune.evaluation.measured import add_fidelity, measure
from headprune.evaluation.metrics import Columns, label, spec_of
from headprune.evaluation.needle import retrieved
from headprune.evaluation.quality import Progress
from headprune.evaluation.report import (
    Difference,
    Metric,
    ModelReport,
    Provenance,
    Report,
)
from headprune.evaluation.samples import Samples
from headprune.model.cost import longest_context, model_cost
from headprune.model.loading import task_of
from headprune.model.placement import alone_on_device
from headprune.model.residency import residency_of
from headprune.model.speed import Speed
from headprune.model.speed import measure as timed
from headprune.schemas.manifest import utc_now
from headprune.tensors.dtypes import dtype_name


@dataclass(frozen=True)
class EvaluationRun:
    """A report with what every window or example gave; the base comes second, if there is one."""

    report: Report
    samples: tuple[Samples, ...]


def evaluate(
    model: str | Path,
    data: DataConfig | Mapping[str, DataConfig],
    config: EvaluateConfig,
    against: str | Path | None = None,
    context: Context = Context(),
) -> Report:
    """Evaluates a model, and its paired difference to a base.

    Args:
        model: Folder or hub id.
        data: Where the examples come from. Of several, by name, the first are the main ones;
            metrics of the others carry their names, as in ``perplexity[brown]``.
        config: How to evaluate.
        against: The base model.
        context: What it runs in.

    Raises:
        HeadpruneError: If model, base and data do not fit together.
    """
    loaded = load(model, data, config, against, context.allowed)
    return run(loaded, config, context.step).report


def run(
    loaded: Loaded,
    config: EvaluateConfig,
    progress: Progress = lambda done, total: None,
) -> EvaluationRun:
    """The second half of ``evaluate``: runs the models; keeps what every window gave."""
    count = len(loaded.nets)

    def step(index: int) -> Progress:
        return lambda done, total: progress(index * total + done, count * total)

    measured = []
    for index, net in enumerate(loaded.nets):
        with alone_on_device(net):
            measured.append(measure(loaded, index, config, step(index)))
    if count == 2:
        add_fidelity(measured[0], measured[1])
    samples = tuple(one.samples for one in measured)
    quality_of = [one.metrics() for one in measured]  # before anything is timed
    speeds: list[Speed] | list[None] = [None] * count
    if config.speed and any(map(residency_of, loaded.nets)):
        said = "Speed is not measured of models that run layer by layer; --no-speed leaves it out."
        warnings.warn(said, HeadpruneWarning, stacklevel=2)
    elif config.speed:
        speeds = timed(loaded.nets, batches=config.decode_batches)
    reports = [
        _report(loaded, index, quality_of[index], found, speeds[index], config.memory)
        for index, found in enumerate(one.columns for one in measured)
    ]
    report = Report(
        provenance=_provenance(loaded, config),
        model=reports[0],
        against=reports[1] if count == 2 else None,
        differences=tuple(_differences(samples, quality_of[0], config)) if count == 2 else (),
    )
    return EvaluationRun(report, samples)


def _report(
    loaded: Loaded,
    index: int,
    metrics: tuple[Metric, ...],
    columns: Columns,
    speed: Speed | None,
    memory: int | None,
) -> ModelReport:
    net = loaded.nets[index]
    return ModelReport(
        id=loaded.ids[index],
        name=loaded.names[index],
        architecture=type(net).__name__,
        task=task_of(net),
        dtype=dtype_name(net.dtype),
        metrics=metrics,
        cost=model_cost(net),
        speed=speed,
        longest_context=None if memory is None else longest_context(net, memory),
        needle=retrieved(loaded.domains[0].needles, columns) or None,
    )


def _differences(
    samples: tuple[Samples, ...], metrics: tuple[Metric, ...], config: EvaluateConfig
) -> list[Difference]:
    found, (model, base) = [], samples
    higher = {one.name: one.higher_is_better for one in metrics}
    both = [name for name in model.metrics() if name in base.metrics()]
    for name in both:
        if model.count(name) != base.count(name):
            raise DataError(
                f"The {label(name)} has {model.count(name)} windows or examples of the model and "
                f"{base.count(name)} of the base, which cannot be compared one by one. Measure "
                "them apart, without --against."
            )
        ours, theirs, spec = model.statistic(name), base.statistic(name), spec_of(name)
        if spec.compared is None:
            continue

        def gap(
            i: Any, a: Any = ours, b: Any = theirs, ratio: bool = spec.compared == "ratio"
        ) -> Any:
            return a(i) / b(i) if ratio else a(i) - b(i)

        interval = bootstrap(
            gap,
            model.count(name),
            config.resamples,
            config.confidence,
            config.seed,
            model.documents_of(name),
        )
        if not interval.is_finite:
            warnings.warn(
                f"The {label(name)} against the base has no finite interval on "
                f"{interval.n} windows or examples, and is left out of the report. Give more.",
                HeadpruneWarning,
                stacklevel=2,
            )
            continue
        found.append(
            Difference(
                name=name,
                kind=spec.compared,
                interval=interval,
                higher_is_better=higher[name],
            )
        )
    return found


def _provenance(loaded: Loaded, config: EvaluateConfig) -> Provenance:
    packages = ["headprune", "torch", "transformers", "datasets"]
    packages += ["lm_eval"] if config.tasks else []
    return Provenance(
        created=utc_now(),
        versions={"python": platform.python_version(), **{p: version(p) for p in packages}},
        platform=f"{platform.system()} {platform.machine()}",
        data=loaded.domains[0].data.model_dump(mode="json"),
        data_sha256=loaded.data_sha256(),
        domains=loaded.further(),
        settings=loaded.settings(config),
    )
