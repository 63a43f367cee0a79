"""What one model does on the data of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedModel

from headprune.config import EvaluateConfig
from headprune.data.read import Examples
from headprune.errors import DataError
from headprune.evaluation import quality
from headprune.evaluation.comparison import Numbers
from headprune.evaluation.endings import endings_predicted
from headprune.evaluation.last_words import last_words
from headprune.evaluation.loaded import LANGUAGE_MODELS, Loaded, LoadedDomain
from headprune.evaluation.metrics import similarity_correlation, within
from headprune.evaluation.needle import NEEDLE
from headprune.evaluation.quality import Floats, Progress
from headprune.evaluation.recall import (
    REPEATED,
    WORDS,
    RecalledWords,
    WordMarks,
    copying_losses,
    repeated_losses,
    repeated_rows,
)
from headprune.evaluation.report import Metric, metric
from headprune.evaluation.samples import Samples
from headprune.evaluation.tasks import TaskScores, task_scores
from headprune.model.loading import CLASSIFIERS, Task, class_ids, task_of

_BY_ROW = (*quality.TokenLosses.COLUMNS, *WORDS, "cosines")  # columns that have a row per window


@dataclass
class Measured:
    """What a model did on all domains, and on tasks.

    Attributes:
        columns: Per sequence or example, what metrics are made of, by domain.
        vectors: Embeddings of the examples of a domain, where that is what it gives.
        others: Metrics of all examples at once.
        documents: By column, the documents that its windows begin in.
    """

    columns: dict[str, Floats] = field(default_factory=dict)
    vectors: dict[str, Floats] = field(default_factory=dict)
    others: list[Metric] = field(default_factory=list)
    documents: dict[str, Numbers] = field(default_factory=dict)

    @property
    def samples(self) -> Samples:
        """What the metrics are made of."""
        return Samples(self.columns, self.documents)

    def metrics(self) -> tuple[Metric, ...]:
        """The metrics.

        Raises:
            DataError: If one of them is not finite.
        """
        samples, known = self.samples, {one.name for one in self.others}
        names = [name for name in samples.metrics() if name not in known]
        found = [metric(name, samples.value(name), samples.count(name)) for name in names]
        return (*found, *self.others)


def measure(loaded: Loaded, index: int, config: EvaluateConfig, progress: Progress) -> Measured:
    """Runs one of the models on everything.

    Args:
        loaded: Models and data.
        index: Which of the models.
        config: How to evaluate.
        progress: Called with windows, passages and needles done, and those of all.
    """
    found, net, done = Measured(), loaded.nets[index], 0
    total = sum(domain.steps for domain in loaded.domains)
    for domain in loaded.domains:

        def step(now: int, _: int, before: int = done) -> None:
            progress(before + now, total)

        columns = _columns(loaded, net, domain, config, step, found)
        found.columns |= {within(name, domain.name): one for name, one in columns.items()}
        if domain.documents is not None:
            names = (within(name, domain.name) for name in _BY_ROW)
            found.documents |= dict.fromkeys(names, domain.documents)
            names = (within(name, domain.name) for name in REPEATED)
            some = domain.documents[repeated_rows(len(domain.rows), config.copying)]
            found.documents |= dict.fromkeys(names, some)
        done += domain.steps
    if config.tasks:
        scores: TaskScores = task_scores(net, loaded.tokenizer, config)
        found.columns |= scores.columns
        found.others += scores.metrics
    return found


def add_fidelity(model: Measured, base: Measured) -> None:
    """Adds how near the embeddings of a model are to those of its base.

    Raises:
        DataError: If there are too few.
    """
    for domain, ours in model.vectors.items():
        theirs, n = base.vectors[domain], len(ours)
        if n < 3:
            raise DataError(
                f"Embeddings are compared on 3 texts at least; the data has {n}. Give a table with "
                "a text per row, or plain text of more sentences."
            )
        model.columns[within("cosines", domain)] = (ours * theirs).sum(1)
        name = within("similarity_correlation", domain)
        model.others.append(metric(name, similarity_correlation(ours, theirs), n))


def _columns(
    loaded: Loaded,
    net: PreTrainedModel,
    domain: LoadedDomain,
    config: EvaluateConfig,
    progress: Progress,
    found: Measured,
) -> dict[str, Floats]:
    """What a model makes of a domain, row by row."""
    task, size = task_of(net), config.batch_size
    rows, tokenizer = domain.rows, loaded.tokenizer
    if task == "causal-lm":
        return _recalled(net, domain, tokenizer, config, progress)
    if task == "seq2seq-lm":
        return quality.translation_losses(net, rows, tokenizer, size, progress).columns()
    if task in LANGUAGE_MODELS:
        return quality.masked_losses(net, rows, tokenizer, size, config.seed, progress).columns()
    if task in CLASSIFIERS:
        said = quality.predictions(net, rows, tokenizer, size, progress)
        return _compared(said, _labels(loaded, net, rows), task)
    vectors = quality.embeddings(net, rows, tokenizer, size, progress)
    found.vectors[domain.name] = vectors
    if not domain.pairs:
        return {}
    return dict(zip(("similarities", "scores"), _pairs(vectors, domain.examples), strict=True))


def _compared(said: Floats, labels: Floats, task: Task) -> dict[str, Floats]:
    """What metrics are made of, of a head for sequences and the labels of its examples."""
    if task == "regression":
        return {"similarities": said[:, 0], "scores": _scores(labels.tolist())}
    right = said == labels
    if task == "classification":
        return {"hits": right.astype(np.float64)}
    return {
        "hits": right.all(1).astype(np.float64),
        "label_hits": (said * labels).sum(1),
        "labels": (said + labels).sum(1),
    }


def _labels(loaded: Loaded, net: PreTrainedModel, rows: Dataset) -> Floats:
    """The labels of rows, which are the first model's, as this one numbers its classes."""
    ids = class_ids(net.config)
    task = task_of(net)
    if task == "regression":
        return np.array(rows["labels"], dtype=np.float64)
    if task == "multi-label":
        first = class_ids(loaded.nets[0].config)
        order = [first[name] for name in sorted(ids, key=ids.__getitem__)]
        return np.array(rows["labels"], dtype=np.float64)[:, order]
    own = {number: ids[name] for name, number in class_ids(loaded.nets[0].config).items()}
    return np.array([own[number] for number in rows["labels"]], dtype=np.float64)


def _recalled(
    net: PreTrainedModel,
    domain: LoadedDomain,
    tokenizer: Any,
    config: EvaluateConfig,
    progress: Progress,
) -> dict[str, Floats]:
    """What a causal language model makes of text, and of its context."""
    words, size, rows = RecalledWords(WordMarks(tokenizer)), config.batch_size, domain.rows
    columns = quality.causal_losses(net, rows, tokenizer, size, progress, words).columns()
    columns |= words.columns()
    length = len(rows[0]["input_ids"])
    if config.copying and length > 3:
        if not domain.name:  # random tokens are of no domain
            columns |= copying_losses(net, tokenizer, config.copying, length, size, config.seed)
        columns |= repeated_losses(net, tokenizer, rows, config.copying, size)

    def step(done: int, total: int) -> None:
        progress(len(rows) + done, total)

    columns |= last_words(net, tokenizer, domain.passages, size, step)
    if not domain.needles:
        return columns

    def later(done: int, total: int) -> None:
        step(len(domain.passages) + done, total)

    hidden = [needle.row for needle in domain.needles]
    hits = endings_predicted(net, hidden, size, later)
    return columns | dict(zip(NEEDLE, [hits], strict=True))


def _pairs(vectors: Floats, examples: Examples) -> tuple[Floats, Floats]:
    labels = examples.spread(len(vectors) // 2).labels
    assert labels is not None
    similarities = (vectors[0::2] * vectors[1::2]).sum(1)
    return similarities, _scores(labels)


def _scores(labels: Sequence[str | float]) -> Floats:
    try:
        scores = np.array([float(label) for label in labels])
    except ValueError as error:
        raise DataError(f"The scores of sentence pairs must be numbers ({error}).") from None
    if not np.isfinite(scores).all() or len(np.unique(scores)) < 2:
        raise DataError(
            f"The {len(scores)} scores of the examples must be finite and not all the same; "
            "a correlation is not defined otherwise."
        )
    return scores
