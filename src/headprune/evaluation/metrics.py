"""The metrics, one row each: a formula over what every sequence or example gave.

One formula gives a metric's value on all sequences and on every resample of them, so that two
models, or a model and the record of an earlier run, are compared sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from headprune.registry import Registry

Floats = NDArray[np.float64]
Columns = Mapping[str, Floats]
Rows = NDArray[np.int64]
"""Indices of sequences, of shape (..., sequences); a formula maps them to shape (...)."""


@dataclass(frozen=True)
class MetricSpec:
    """What is known of a metric.

    Attributes:
        unit: Its unit; "1" for none.
        higher_is_better: Its direction.
        meaning: What it says, in a sentence for the reference.
        columns: What it is made of, per sequence or example; see ``Samples``.
        formula: From columns and rows to the metric; None where it is no function of single ones.
        compared: How the value of a model is compared with that of its base; None for not at all.
        leads: Whether reports draw it, where a model has it.
        beside: Whether sweeps list it beside what leads.
        of_two: Whether it needs the original beside the model.
    """

    unit: str
    higher_is_better: bool
    meaning: str
    columns: tuple[str, ...] = ()
    formula: Callable[[Columns, Rows], Any] | None = None
    compared: Literal["ratio", "difference"] | None = None
    leads: bool = False
    beside: bool = False
    of_two: bool = False


def rank_correlation(a: Floats, b: Floats) -> float:
    """Spearman's correlation: Pearson's of the ranks, where ties get their mean rank.

    Returns:
        Between -1 and 1; NaN where all values of ``a`` or of ``b`` are the same.
    """
    x, y = (ranks - ranks.mean() for ranks in (rankdata(a), rankdata(b)))
    norm = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / norm if norm else float("nan")


def similarity_correlation(a: Floats, b: Floats) -> float:
    """Pearson's correlation of all pairwise similarities within each of two sets of embeddings.

    Args:
        a: Normalised embeddings of texts by one model, shape (texts, hidden).
        b: Those of the same texts by the other.

    Returns:
        Between -1 and 1; NaN where all similarities within a set are the same.
    """
    variances = _covariance(a, a), _covariance(b, b)
    if min(variances) <= _ROUNDING:
        return float("nan")
    return _covariance(a, b) / float(np.sqrt(variances[0] * variances[1]))


_ROUNDING = 1e-12  # variance that rounding in float32 leaves where all similarities are the same


def _covariance(a: Floats, b: Floats) -> float:
    """Covariance of a_i.a_j with b_i.b_j over all pairs i < j.

    The sum of their products over all i and j is |A^T B|^2, so that no matrix of texts x texts is
    ever made.
    """
    n = len(a)
    if n < 2:
        return 0.0
    of_a, of_b = (a * a).sum(1), (b * b).sum(1)
    pairs = n * (n - 1) / 2
    products = (((a.T @ b) ** 2).sum() - of_a @ of_b) / 2
    sums = [((m.sum(0) ** 2).sum() - squares.sum()) / 2 for m, squares in ((a, of_a), (b, of_b))]
    return float(products / pairs - sums[0] * sums[1] / pairs**2)


def _nll(columns: Columns, i: Rows) -> Any:
    return columns["nll_nats"][i].sum(-1) / columns["tokens"][i].sum(-1)


def _bits_per_byte(columns: Columns, i: Rows) -> Any:
    return columns["nll_nats"][i].sum(-1) / (np.log(2) * columns["utf8_bytes"][i].sum(-1))


def _spearman(columns: Columns, i: Rows) -> Any:
    def of_one(row: Rows) -> float:
        return rank_correlation(columns["similarities"][row], columns["scores"][row])

    return np.apply_along_axis(of_one, -1, i)


def _pearson(columns: Columns, i: Rows) -> Any:
    x, y = (columns[name][i] for name in ("similarities", "scores"))
    x, y = (each - each.mean(-1, keepdims=True) for each in (x, y))
    with np.errstate(invalid="ignore"):  # a resample may hold one value alone
        return (x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1))


def _micro_f1(columns: Columns, i: Rows) -> Any:
    """Twice the labels said and true over those said and those true; 1 where there is none."""
    hits, either = (columns[name][i].sum(-1) for name in ("label_hits", "labels"))
    return np.where(either > 0, 2 * hits / np.maximum(either, 1), 1.0)


def within(name: str, domain: str) -> str:
    """The name of a metric, or of a column, on a domain; on the main one, "", it is plain."""
    return f"{name}[{domain}]" if domain else name


def parted(name: str) -> tuple[str, str]:
    """A metric, or a column, and its domain: ``perplexity[brown]`` is ("perplexity", "brown")."""
    metric, _, domain = name.partition("[")
    return metric, domain.removesuffix("]")


def is_score(name: str) -> bool:
    """Whether it names a score of a task, as ``lambada_openai:acc`` does."""
    return ":" in name.partition("[")[0]


def spec_of(name: str) -> MetricSpec:
    """What is known of a metric on any domain, or of a score."""
    return SCORE if is_score(name) else METRICS[parted(name)[0]]


def label(name: str) -> str:
    """A metric as tables show it: ``perplexity [brown]``, ``lambada_openai: acc norm``."""
    task, colon, score = name.partition(":")
    if is_score(name):
        return f"{task}{colon} {score.replace('_', ' ')}"
    metric, domain = parted(name)
    return f"{metric.replace('_', ' ')} [{domain}]" if domain else metric.replace("_", " ")


# in the order in which reports list them
METRICS: Registry[MetricSpec] = Registry("metric")
METRICS.add(
    "perplexity",
    MetricSpec(
        "1",
        False,
        "exp of the mean loss per token",
        ("nll_nats", "tokens"),
        lambda c, i: np.exp(_nll(c, i)),
        compared="ratio",
        leads=True,
    ),
)
METRICS.add(
    "bits_per_byte",
    MetricSpec(
        "bits/byte",
        False,
        "loss per byte of text, which does not depend on the tokenizer",
        ("nll_nats", "utf8_bytes"),
        _bits_per_byte,
    ),
)
METRICS.add(
    "nll_nats_per_token",
    MetricSpec(
        "nats/token",
        False,
        "mean loss per token",
        ("nll_nats", "tokens"),
        _nll,
        compared="difference",
    ),
)
METRICS.add(
    "word_accuracy",
    MetricSpec(
        "1",
        True,
        "share of the words in the second half of a sequence that are predicted",
        ("words", "word_hits"),
        lambda c, i: c["word_hits"][i].sum(-1) / c["words"][i].sum(-1),
        compared="difference",
    ),
)
METRICS.add(
    "seen_word_accuracy",
    MetricSpec(
        "1",
        True,
        "the same, of words that stand earlier in the sequence",
        ("seen_words", "seen_word_hits"),
        lambda c, i: c["seen_word_hits"][i].sum(-1) / c["seen_words"][i].sum(-1),
        compared="difference",
    ),
)
METRICS.add(
    "copying_nll",
    MetricSpec(
        "nats/token",
        False,
        "mean loss on the second of two equal runs of random tokens",
        ("copied_nll_nats", "copied_tokens"),
        lambda c, i: c["copied_nll_nats"][i].sum(-1) / c["copied_tokens"][i].sum(-1),
        compared="difference",
        beside=True,
    ),
)
METRICS.add(
    "repeated_passage_nll",
    MetricSpec(
        "nats/token",
        False,
        "mean loss on the second of two equal passages of the text",
        ("repeated_nll_nats", "repeated_tokens"),
        lambda c, i: c["repeated_nll_nats"][i].sum(-1) / c["repeated_tokens"][i].sum(-1),
        compared="difference",
    ),
)
METRICS.add(
    "last_word_accuracy",
    MetricSpec(
        "1",
        True,
        "share of the passages whose last word is predicted",
        ("last_word_hits",),
        lambda c, i: c["last_word_hits"][i].mean(-1),
        compared="difference",
        beside=True,
    ),
)
METRICS.add(
    "seen_last_word_accuracy",
    MetricSpec(
        "1",
        True,
        "the same, of last words that stand earlier in the passage",
        ("seen_last_words", "seen_last_word_hits"),
        lambda c, i: c["seen_last_word_hits"][i].sum(-1) / c["seen_last_words"][i].sum(-1),
        compared="difference",
    ),
)
METRICS.add(
    "needle_accuracy",
    MetricSpec(
        "1",
        True,
        "share of the numbers hidden in the text that are found",
        ("needle_hits",),
        lambda c, i: c["needle_hits"][i].mean(-1),
        compared="difference",
        beside=True,
    ),
)
METRICS.add(
    "accuracy",
    MetricSpec(
        "1",
        True,
        "share of examples whose label, or all of whose labels, are predicted",
        ("hits",),
        lambda c, i: c["hits"][i].mean(-1),
        compared="difference",
        leads=True,
    ),
)
METRICS.add(
    "micro_f1",
    MetricSpec(
        "1",
        True,
        "F1 over all labels of all examples, where an example may have several",
        ("label_hits", "labels"),
        _micro_f1,
        compared="difference",
        beside=True,
    ),
)
METRICS.add(
    "spearman",
    MetricSpec(
        "1",
        True,
        "rank correlation of scores with similarities of sentence pairs, or with predictions",
        ("similarities", "scores"),
        _spearman,
        compared="difference",
        leads=True,
    ),
)
METRICS.add(
    "pearson",
    MetricSpec(
        "1",
        True,
        "correlation of the same",
        ("similarities", "scores"),
        _pearson,
        compared="difference",
    ),
)
METRICS.add(
    "mean_cosine",
    MetricSpec(
        "1",
        True,
        "mean cosine of the embeddings of a text by the model and by its original",
        ("cosines",),
        lambda c, i: c["cosines"][i].mean(-1),
        of_two=True,
    ),
)
METRICS.add(
    "similarity_correlation",
    MetricSpec(
        "1",
        True,
        "correlation of all pairwise similarities of texts, by the model and by its original",
        leads=True,
        of_two=True,
    ),
)

# of lm-eval, whose tasks say in which direction they are better; higher is what most of them do
SCORE = MetricSpec("1", True, "mean score of the examples of a task", compared="difference")
