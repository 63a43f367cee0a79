"""headprune evaluate: quality, size and speed, also against another model."""

from __future__ import annotations

import operator
import platform
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from headprune.config import DataConfig, EvaluateConfig
from headprune.context import Context, Progress, continued
from headprune.data.audio import Recordings, recordings_per_pass, speech_of
from headprune.data.images import Images, pixels_of
from headprune.data.needles import Needle
from headprune.data.text import Collate
from headprune.errors import DataError, HeadpruneWarning
from headprune.evaluation.comparison import Numbers
from headprune.evaluation.loaded import Loaded, LoadedDomain, load
from headprune.evaluation.metrics import (
    FEWEST_WORDS,
    LAST_WORDS,
    NEEDLES,
    PASSAGE_WORDS,
    Floats,
    Samples,
    interval_of,
    label,
    plain,
    similarity_correlation,
    spec_of,
    within,
)
from headprune.evaluation.quality import LOSSES, Pass
from headprune.evaluation.report import (
    Difference,
    Metric,
    ModelReport,
    Provenance,
    Report,
    Retrieval,
)
from headprune.evaluation.speed import PROMPT, Speed
from headprune.evaluation.speed import measure as timed
from headprune.evaluation.task_table import COSINES, TASKS
from headprune.evaluation.tasks import task_scores
from headprune.evaluation.written import scores, transcribe, write
from headprune.evidence.recall import passage_dependent_words
from headprune.model.answers import Prompt, answered
from headprune.model.batch import modality_of
from headprune.model.cost import longest_context, model_cost, stated_context
from headprune.model.loading import task_of
from headprune.model.placement import alone_on_device
from headprune.model.residency import residency_of
from headprune.schemas.manifest import utc_now
from headprune.tensors.dtypes import dtype_name

_BY_ROW = (*LOSSES, "cosines")  # columns that have a row per window


@dataclass(frozen=True)
class EvaluationRun:
    """A report, and the samples of each model; the base comes second, if there is one."""

    report: Report
    samples: tuple[Samples, ...]


@dataclass
class Measured:
    """Results of one model on all domains, and on tasks.

    Attributes:
        samples: The columns of metrics.
        vectors: By domain, the embeddings of its texts, from a model without a head.
        whole: Metrics that are no function of single examples.
    """

    samples: Samples
    vectors: dict[str, Floats] = field(default_factory=dict)
    whole: list[Metric] = field(default_factory=list)

    def metrics(self) -> tuple[Metric, ...]:
        """Return all metrics; raises DataError if one is not finite."""
        known = {one.name for one in self.whole}
        names = [name for name in self.samples.metrics() if name not in known]
        values = ((name, self.samples.value(name), self.samples.count(name)) for name in names)
        return (*(Metric.of(*each) for each in values), *self.whole)


def evaluate(
    model: str | Path,
    data: DataConfig | Mapping[str, DataConfig],
    config: EvaluateConfig,
    against: str | Path | None = None,
    context: Context = Context(),
) -> Report:
    """Evaluate a model, and its paired difference to a base.

    Args:
        model: Folder or hub id.
        data: Source of the examples. Of several, by name, the first is the main one; metrics of the
            others carry their names, as in ``perplexity[brown]``.
        config: Settings.
        against: The base model.
        context: Progress and permissions.

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
    """Run the models: the second half of ``evaluate``, with the samples."""
    count = len(loaded.nets)
    parts = count + any(len(domain.passage_words) >= FEWEST_WORDS for domain in loaded.domains)

    def step(index: int) -> Progress:
        return lambda done, total: progress(index * total + done, parts * total)

    measured = []
    for index, net in enumerate(loaded.nets):
        with alone_on_device(net):
            measured.append(measure(loaded, index, config, step(index)))
    if count == 2:
        _add_fidelity(*measured)
        _add_passage_words(loaded, measured, config.batch_size, step(count))
    metrics = [one.metrics() for one in measured]  # before anything is timed
    timings: list[list[Speed]] = []  # by prompt, then by model
    if config.speed and any(map(residency_of, loaded.nets)):
        why = "Speed is not measured of models that run layer by layer; --no-speed leaves it out."
        warnings.warn(why, HeadpruneWarning, stacklevel=2)
    elif config.speed and modality_of(loaded.nets[0]) == "text":
        prompts = (PROMPT, *config.speed_contexts)
        timings = [timed(loaded.nets, each, batches=config.decode_batches) for each in prompts]
    reports = [
        _report(
            loaded, index, metrics[index], one.samples, [t[index] for t in timings], config.memory
        )
        for index, one in enumerate(measured)
    ]
    samples = tuple(one.samples for one in measured)
    report = Report(
        provenance=_provenance(loaded, config),
        model=reports[0],
        against=reports[1] if count == 2 else None,
        differences=tuple(_differences(samples, metrics[0], config)) if count == 2 else (),
    )
    return EvaluationRun(report, samples)


def measure(loaded: Loaded, index: int, config: EvaluateConfig, progress: Progress) -> Measured:
    """Run one of the models on everything; progress counts sequences and prompts."""
    columns: dict[str, Floats] = {}
    documents: dict[str, Numbers] = {}
    result, net, done = Measured(Samples(columns, documents)), loaded.nets[index], 0
    total = sum(
        len(domain.rows) + len(domain.prompts) + len(domain.references) for domain in loaded.domains
    )
    for domain in loaded.domains:
        step = continued(progress, done, total)
        given = _columns(loaded, index, domain, config, result, step)
        columns |= {within(name, domain.name): column for name, column in given.items()}
        if domain.documents is not None:
            later = [COSINES] * (domain.name in result.vectors)
            by_row = [name for name in (*given, *later) if plain(name) in _BY_ROW]
            documents |= {within(name, domain.name): domain.documents for name in by_row}
        done += len(domain.rows) + len(domain.prompts)
        if domain.references:
            step = continued(progress, done, total)
            how = (loaded.tokenizer, config.batch_size, config.max_new_tokens, step)
            if isinstance(domain.examples, Recordings):
                written = transcribe(net, domain.examples, *how)
            else:
                written = write(net, domain.sources, *how)
            counted, numbers = scores(config.metrics, written, domain.references)
            columns |= {within(name, domain.name): column for name, column in counted.items()}
            result.whole += [
                one.model_copy(update={"name": within(one.name, domain.name)}) for one in numbers
            ]
            done += len(domain.references)
    if config.tasks:
        of_tasks, by_example = task_scores(net, loaded.tokenizer, config)
        columns |= by_example
        result.whole += of_tasks
    return result


def _columns(
    loaded: Loaded,
    index: int,
    domain: LoadedDomain,
    config: EvaluateConfig,
    measured: Measured,
    progress: Progress,
) -> dict[str, Floats]:
    """Return the columns of a model on a domain; embeddings are added to ``measured``."""
    net, tokenizer, given = loaded.nets[index], loaded.tokenizer, domain.examples
    task, truth = TASKS[task_of(net)], loaded.truth(domain)
    collate: Collate | None = None
    size = config.batch_size
    if isinstance(given, Images):
        collate = pixels_of(given, tokenizer)
    elif isinstance(given, Recordings):
        collate, size = speech_of(given, net, tokenizer), recordings_per_pass(net, size)
    how = (size, progress, collate, config.seed, loaded.order(index))
    outputs = task.outputs(Pass(net, domain.rows, tokenizer, *how))
    if COSINES in task.names(truth):  # to be compared with those of the base
        measured.vectors[domain.name] = outputs
    return {**task.columns(outputs, truth), **_hits(net, domain, config.batch_size, progress)}


def _hits(
    net: PreTrainedModel, domain: LoadedDomain, size: int, progress: Progress
) -> dict[str, Floats]:
    """Return the answers of a causal language model to the prompts of a domain."""
    later = continued(progress, len(domain.rows), len(domain.rows) + len(domain.prompts))
    hits, nats = answered(net, domain.prompts, size, later)
    of_words, count = hits[: len(domain.last_words)], len(domain.last_words)
    columns = zip((*LAST_WORDS, *NEEDLES), (of_words, hits[count:], nats[count:]), strict=True)
    return {name: column for name, column in columns if len(column)}


def _add_fidelity(model: Measured, base: Measured) -> None:
    """Add how near the embeddings of a model are to those of its base."""
    for domain, ours in model.vectors.items():
        theirs, n = base.vectors[domain], len(ours)
        if n < 3:
            raise DataError(
                f"Embeddings are compared on 3 texts at least; the data has {n}. Give a table with "
                "a text per row, or plain text of more sentences."
            )
        cosines = {within(COSINES, domain): (ours * theirs).sum(1)}
        model.samples = Samples({**model.samples.columns, **cosines}, model.samples.documents)
        name = within("similarity_correlation", domain)
        model.whole.append(Metric.of(name, similarity_correlation(ours, theirs), n))


def _add_passage_words(
    loaded: Loaded, measured: Sequence[Measured], batch_size: int, progress: Progress
) -> None:
    """Add the words that only the passage tells the base, and of these the model's hits."""
    model, base = loaded.nets
    total, done = sum(len(domain.passage_words) for domain in loaded.domains), 0
    for domain in loaded.domains:
        if not domain.passage_words:
            continue
        step = continued(progress, done, total)
        words: list[Prompt] = []
        if enough := len(domain.passage_words) >= FEWEST_WORDS:
            with alone_on_device(base):
                words = passage_dependent_words(base, domain.passage_words, batch_size, step)
        done += len(domain.passage_words)
        if len(words) < FEWEST_WORDS:
            count = len(words) if enough else f"at most {len(domain.passage_words)}"
            warnings.warn(
                f"The passage alone tells the original {count} words of '{domain.data.source}'; "
                f"passage_words needs {FEWEST_WORDS}, and is left out.",
                HeadpruneWarning,
                stacklevel=2,
            )
            continue
        with alone_on_device(model):
            hits = answered(model, words, batch_size).hits
        for one, column in zip(measured, (hits, np.ones(len(words))), strict=True):
            columns = {within(*PASSAGE_WORDS, domain.name): column}
            one.samples = replace(one.samples, columns={**one.samples.columns, **columns})


def _report(
    loaded: Loaded,
    index: int,
    metrics: tuple[Metric, ...],
    samples: Samples,
    speeds: Sequence[Speed],
    memory: int | None,
) -> ModelReport:
    net = loaded.nets[index]
    needles = loaded.domains[0].needles
    found = [samples.columns[name] for name in NEEDLES] if needles else []
    return ModelReport(
        id=loaded.ids[index],
        name=loaded.names[index],
        architecture=type(net).__name__,
        task=task_of(net),
        dtype=dtype_name(net.dtype),
        metrics=metrics,
        cost=model_cost(net, stated_context(*loaded.nets)),
        speed=next(iter(speeds), None),
        speed_at=tuple(speeds[1:]),
        longest_context=None if memory is None else longest_context(net, memory),
        needle=retrieved(needles, *found) if needles else None,
    )


def retrieved(needles: Sequence[Needle], hits: Floats, nats: Floats) -> tuple[Retrieval, ...]:
    """Return the share of retrieved needles and their loss, by context length and depth."""
    cells: dict[tuple[int, float], list[int]] = {}
    for number, needle in enumerate(needles):
        cells.setdefault((len(needle.row.ids), needle.depth), []).append(number)
    means = (
        (cell, len(some), hits[some].mean(), nats[some].mean()) for cell, some in cells.items()
    )
    return tuple(
        Retrieval(tokens=tokens, depth=depth, accuracy=float(share), nats=float(loss), n=n)
        for (tokens, depth), n, share, loss in means
    )


def _differences(
    samples: tuple[Samples, ...], metrics: tuple[Metric, ...], config: EvaluateConfig
) -> list[Difference]:
    differences, (model, base) = [], samples
    higher = {one.name: one.higher_is_better for one in metrics}
    for name in (name for name in model.metrics() if name in base.metrics()):
        n, kind = model.count(name), spec_of(name).compared
        if n != base.count(name):
            raise DataError(
                f"The {label(name)} has {n} windows or examples of the model and "
                f"{base.count(name)} of the base, which cannot be compared one by one. Measure "
                "them apart, without --against."
            )
        if kind is None:
            continue
        gap = operator.truediv if kind == "ratio" else operator.sub
        how = (config.resamples, config.confidence, config.seed)
        interval = interval_of(name, gap, model, base, *how)
        if interval.is_finite:
            differences.append(
                Difference(name=name, kind=kind, interval=interval, higher_is_better=higher[name])
            )
        else:
            warnings.warn(
                f"The {label(name)} against the base has no finite interval on "
                f"{n} windows or examples, and is left out of the report. Give more.",
                HeadpruneWarning,
                stacklevel=2,
            )
    return differences


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
