"""headprune evaluate: quality, size and speed, also against another model."""

from __future__ import annotations

import hashlib
import platform
import warnings
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedModel

from headprune.config import DataConfig, EvaluateConfig
from headprune.data.sequences import packed_sequences, tokenized_rows, translation_rows
from headprune.data.sources import Examples, read_examples
from headprune.errors import DataError, HeadpruneWarning
from headprune.evaluation import quality
from headprune.evaluation.comparison import bootstrap
from headprune.evaluation.metrics import METRICS, similarity_correlation
from headprune.evaluation.quality import Floats, Progress, TokenLosses
from headprune.evaluation.recall import COPYING, WORDS, RecalledWords, WordMarks, copying_losses
from headprune.evaluation.refusals import refuse_other_tokenizer, refuse_unfit
from headprune.evaluation.report import (
    Difference,
    Metric,
    ModelReport,
    Provenance,
    Report,
    metric,
)
from headprune.evaluation.samples import Samples
from headprune.model.cost import longest_context, model_cost
from headprune.model.identity import id_of_model
from headprune.model.lengths import usable_length
from headprune.model.loading import (
    from_pretrained,
    load_config,
    load_tokenizer,
    parse_dtype,
    task_of,
    vocabulary_of,
)
from headprune.model.precision import refuse_missing_dtype, refuse_not_finite
from headprune.model.refusals import refuse_without_text
from headprune.model.speed import Speed, measure
from headprune.tensors.dtypes import dtype_name

LANGUAGE_MODELS = ("causal-lm", "masked-lm", "seq2seq-lm")
_PACKED = ("causal-lm", "masked-lm")  # their text is cut into sequences of one length


@dataclass
class _Measured:
    """A model, and what it did on the data; ``others`` are metrics of all of it at once."""

    id: str | None
    name: str
    net: PreTrainedModel
    columns: dict[str, Floats]
    vectors: Floats = field(default_factory=lambda: np.empty(0))
    others: list[Metric] = field(default_factory=list)

    def metrics(self) -> tuple[Metric, ...]:
        """The metrics.

        Raises:
            DataError: If one of them is not finite.
        """
        samples = Samples(self.columns)
        names = samples.metrics()
        found = [metric(name, samples.value(name), samples.count(name)) for name in names]
        return (*found, *self.others)

    def report(
        self, metrics: tuple[Metric, ...], speed: Speed | None, memory: int | None
    ) -> ModelReport:
        return ModelReport(
            id=self.id,
            name=self.name,
            architecture=type(self.net).__name__,
            task=task_of(self.net),
            dtype=dtype_name(self.net.dtype),
            metrics=metrics,
            cost=model_cost(self.net),
            speed=speed,
            longest_context=None if memory is None else longest_context(self.net, memory),
        )


@dataclass(frozen=True)
class Loaded:
    """Models and examples that fit together; the base comes second, if there is one.

    Attributes:
        ids: Ids of the models, where their files are at hand.
        names: Folders or hub ids.
        nets: The models.
        tokenizer: That of the first.
        examples: The documents.
        rows: What the models read.
    """

    ids: tuple[str | None, ...]
    names: tuple[str, ...]
    nets: tuple[PreTrainedModel, ...]
    tokenizer: Any
    examples: Examples
    rows: Dataset

    @property
    def pairs(self) -> bool:
        """Whether the examples are scored pairs."""
        return self.examples.labels is not None and self.examples.width == 2

    def metrics(self) -> tuple[str, ...]:
        """The metrics of which every window or example has its part."""
        task = task_of(self.nets[0])
        if task in LANGUAGE_MODELS:
            columns = [*TokenLosses.COLUMNS]
            if task == "causal-lm":
                columns += COPYING
                columns += WORDS if WordMarks(self.tokenizer).any else ()
            return Samples(dict.fromkeys(columns, np.zeros(1))).metrics()
        if task == "classification":
            return ("accuracy",)
        paired = ("mean_cosine",) if len(self.nets) == 2 else ()
        return (*(("spearman",) if self.pairs else ()), *paired)

    def settings(self, config: EvaluateConfig) -> dict[str, Any]:
        """The settings of a run; the length of packed sequences is the one that they have."""
        used = {}
        if task_of(self.nets[0]) in _PACKED:
            used = {"seq_len": len(self.rows[0]["input_ids"])}
        settings = config.model_dump(mode="json")
        if not config.copying:  # nor does a record say so that is older than the setting
            del settings["copying"]
        return {**settings, **used}

    def data_sha256(self) -> str:
        """Digest of the texts and labels, in order."""
        return self.examples.sha256

    def inputs_sha256(self) -> str:
        """Digest of the token ids that the models read, which tokenizer and settings decide."""
        digest = hashlib.sha256()
        for name in sorted(self.rows.column_names):
            for row in self.rows[name]:
                digest.update(f"{name} {row}\0".encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class EvaluationRun:
    """A report with what every window or example gave; the base comes second, if there is one."""

    report: Report
    samples: tuple[Samples, ...]


def evaluate(
    model: str | Path,
    data: DataConfig,
    config: EvaluateConfig,
    against: str | Path | None = None,
    trust_remote_code: bool = False,
    drop_unexpected: bool = False,
    progress: Progress = lambda done, total: None,
) -> Report:
    """Evaluates a model, and its paired difference to a base.

    Args:
        model: Folder or hub id.
        data: Where the examples come from.
        config: How to evaluate.
        against: The base model.
        trust_remote_code: Allow code that comes with the models.
        drop_unexpected: Go on without tensors of the checkpoints that the models' classes do
            not take.
        progress: Called with windows done and windows in all, for each model.

    Raises:
        HeadpruneError: If model, base and data do not fit together.
    """
    loaded = load(model, data, config, against, trust_remote_code, drop_unexpected)
    return run(loaded, data, config, progress).report


def load(
    model: str | Path,
    data: DataConfig,
    config: EvaluateConfig,
    against: str | Path | None = None,
    trust_remote_code: bool = False,
    drop_unexpected: bool = False,
) -> Loaded:
    """The first half of ``evaluate``, which finds what does not fit before any work is done."""
    examples = read_examples(data)
    names = [str(name) for name in (model, against) if name is not None]
    for name in names:
        load_config(name, trust_remote_code=trust_remote_code)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    nets = []
    for name in names:
        net = from_pretrained(
            name,
            dtype=parse_dtype(config.dtype.value),
            trust_remote_code=trust_remote_code,
            drop_unexpected=drop_unexpected,
        )
        refuse_missing_dtype(net.dtype, device)
        refuse_without_text(net, "evaluate")
        nets.append(net.to(device))
        refuse_not_finite(net, name)
    tokenizer = load_tokenizer(names[0], trust_remote_code=trust_remote_code)
    refuse_unfit(nets, names, examples, config)
    if against is not None:
        base = load_tokenizer(names[1], trust_remote_code=trust_remote_code)
        refuse_other_tokenizer(tokenizer, base, names)
    rows = _rows(nets[0], tokenizer, examples, config)
    ids = tuple(id_of_model(name) for name in names)
    return Loaded(ids, tuple(names), tuple(nets), tokenizer, examples, rows)


def run(
    loaded: Loaded,
    data: DataConfig,
    config: EvaluateConfig,
    progress: Progress = lambda done, total: None,
) -> EvaluationRun:
    """The second half of ``evaluate``: runs the models; keeps what every window gave."""
    count = len(loaded.nets)

    def step(index: int) -> Progress:
        return lambda done, total: progress(index * total + done, count * total)

    measured = [_measure(loaded, index, config, step(index)) for index in range(count)]
    if count == 2 and task_of(loaded.nets[0]) == "features":
        _add_fidelity(measured[0], measured[1])
    samples = tuple(Samples(m.columns) for m in measured)
    quality_of = [m.metrics() for m in measured]  # before anything is timed
    speeds: list[Speed] | list[None] = [None] * count
    if config.speed:
        speeds = measure(loaded.nets, batches=config.decode_batches)
    reports = [
        m.report(found, speed, config.memory)
        for m, found, speed in zip(measured, quality_of, speeds, strict=True)
    ]
    report = Report(
        provenance=_provenance(data, loaded, config),
        model=reports[0],
        against=reports[1] if count == 2 else None,
        differences=tuple(_differences(samples[0], samples[1], config)) if count == 2 else (),
    )
    return EvaluationRun(report, samples)


def _rows(
    net: PreTrainedModel, tokenizer: Any, examples: Examples, config: EvaluateConfig
) -> Dataset:
    """Windows for language models, one row per text for the others; pairs give two rows each."""
    task, known = task_of(net), vocabulary_of(net)
    seq_len = usable_length(net.config, tokenizer, config.seq_len)
    if task in _PACKED:
        return packed_sequences(
            examples,
            tokenizer,
            seq_len,
            specials=task == "masked-lm",
            vocabulary=known,
            most=config.max_windows,
            also=[tokenizer.mask_token_id] if task == "masked-lm" else [],
        )
    some = examples.first(config.max_windows)
    if task == "seq2seq-lm":
        return translation_rows(some, tokenizer, seq_len, known)
    if task == "classification":
        return tokenized_rows(some, tokenizer, seq_len, net.config.label2id, known)
    return tokenized_rows(some, tokenizer, seq_len, vocabulary=known, apart=True)


def _measure(loaded: Loaded, index: int, config: EvaluateConfig, progress: Progress) -> _Measured:
    who, net = (loaded.ids[index], loaded.names[index]), loaded.nets[index]
    task, size = task_of(net), config.batch_size
    rows, tokenizer = loaded.rows, loaded.tokenizer
    if task in LANGUAGE_MODELS:
        if task == "causal-lm":
            return _Measured(*who, net, _recalled(net, rows, tokenizer, config, progress))
        if task == "seq2seq-lm":
            losses = quality.translation_losses(net, rows, tokenizer, size, progress)
        else:
            losses = quality.masked_losses(net, rows, tokenizer, size, config.seed, progress)
        return _Measured(*who, net, losses.columns())
    if task == "classification":
        labels = quality.predicted_labels(net, rows, tokenizer, size, progress)
        hits = labels == np.array(rows["labels"])
        return _Measured(*who, net, {"hits": hits.astype(np.float64)})
    vectors = quality.embeddings(net, rows, tokenizer, size, progress)
    columns = {}
    if loaded.pairs:
        columns = dict(
            zip(("similarities", "scores"), _pairs(vectors, loaded.examples), strict=True)
        )
    return _Measured(*who, net, columns, vectors)


def _recalled(
    net: PreTrainedModel, rows: Dataset, tokenizer: Any, config: EvaluateConfig, progress: Progress
) -> dict[str, Floats]:
    """What a causal language model makes of text, and of its context."""
    words, size = RecalledWords(WordMarks(tokenizer)), config.batch_size
    columns = quality.causal_losses(net, rows, tokenizer, size, progress, words).columns()
    length = len(rows[0]["input_ids"])
    if config.copying and length > 3:
        columns |= copying_losses(net, tokenizer, config.copying, length, size, config.seed)
    return {**columns, **words.columns()}


def _pairs(vectors: Floats, examples: Examples) -> tuple[Floats, Floats]:
    assert examples.labels is not None
    similarities = (vectors[0::2] * vectors[1::2]).sum(1)
    try:
        scores = np.array([float(label) for label in examples.labels[: len(similarities)]])
    except ValueError as error:
        raise DataError(f"The scores of sentence pairs must be numbers ({error}).") from None
    if not np.isfinite(scores).all() or len(np.unique(scores)) < 2:
        raise DataError(
            f"The {len(scores)} scores of the sentence pairs must be finite and not all the same; "
            "a rank correlation is not defined otherwise."
        )
    return similarities, scores


def _add_fidelity(model: _Measured, base: _Measured) -> None:
    n = len(model.vectors)
    if n < 3:
        raise DataError(f"Embeddings are compared on 3 texts at least; the data has {n}.")
    model.columns["cosines"] = (model.vectors * base.vectors).sum(1)
    correlation = similarity_correlation(model.vectors, base.vectors)
    model.others.append(metric("similarity_correlation", correlation, n))


def _differences(model: Samples, base: Samples, config: EvaluateConfig) -> list[Difference]:
    found = []
    for name in (name for name in model.metrics() if METRICS[name].compared):
        ours, theirs, spec = model.statistic(name), base.statistic(name), METRICS[name]
        assert spec.compared is not None  # as the loop chose

        def gap(
            i: Any, a: Any = ours, b: Any = theirs, ratio: bool = spec.compared == "ratio"
        ) -> Any:
            return a(i) / b(i) if ratio else a(i) - b(i)

        interval = bootstrap(
            gap, model.count(name), config.resamples, config.confidence, config.seed
        )
        if not interval.is_finite:
            warnings.warn(
                f"The {name.replace('_', ' ')} against the base has no finite interval on "
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
                higher_is_better=spec.higher_is_better,
            )
        )
    return found


def _provenance(data: DataConfig, loaded: Loaded, config: EvaluateConfig) -> Provenance:
    packages = ("headprune", "torch", "transformers", "datasets")
    return Provenance(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions={"python": platform.python_version(), **{p: version(p) for p in packages}},
        platform=f"{platform.system()} {platform.machine()}",
        data=data.model_dump(mode="json"),
        data_sha256=loaded.data_sha256(),
        settings=loaded.settings(config),
    )
