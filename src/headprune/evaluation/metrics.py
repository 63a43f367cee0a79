"""Metrics: one decorated function each, over numbers per sequence or example.

The parameters of a function name its columns, of shape (..., sequences); it returns the metric, of
shape (...): the value itself, or one value per resample. Its docstring is the sentence of the
reference. Two models are therefore compared sequence by sequence with the same function.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from headprune.evaluation.comparison import (
    FEWEST,
    Interval,
    Numbers,
    Outcomes,
    Statistic,
    Weighted,
    bootstrap,
    of_bounded,
    of_shares,
    of_skewed,
)
from headprune.registry import Registry

# columns of answers
LAST_WORDS = ("last_word_hits",)  # in the spirit of LAMBADA (Paperno et al. 2016, 1606.06031)
PASSAGE_WORDS = ("passage_word_hits",)  # last words that only the passage tells
NEEDLES = ("needle_hits", "needle_answer_nats")
FEWEST_WORDS = 50  # passage words that a share of them rests on

Floats = NDArray[np.float64]
Columns = Mapping[str, Floats]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class MetricSpec:
    """A metric.

    Attributes:
        unit: Its unit; "1" for none.
        higher_is_better: Its direction.
        meaning: Its sentence in the reference.
        formula: From columns to the metric; None if it is no function of single examples.
        columns: Names of the columns, in the order of the formula.
        compared: Comparison with the base; None for none.
        of_two: Whether it needs the original beside the model.
        proportion: Whether it is the share of examples that succeed, each by itself.
        scale: Its highest value, where examples have a lowest and a highest one and the metric is a
            function of their sums; 0 is the lowest.
        in_tables: Whether tables show it beside the file, which holds every metric.
        settings: Settings of ``evaluate`` that decide this metric alone.
    """

    unit: str
    higher_is_better: bool
    meaning: str
    formula: Callable[..., Any] | None
    columns: tuple[str, ...] = ()
    compared: Literal["ratio", "difference"] | None = None
    of_two: bool = False
    proportion: bool = False
    scale: int | None = None
    in_tables: bool = True
    settings: tuple[str, ...] = ()


METRICS: Registry[MetricSpec] = Registry("metric")  # in the order of reports
_WRITTEN = ("max_new_tokens",)  # decides metrics of written text
_NEEDLE = ("needle_lengths", "needle_trials", "needle_keys", "needle_window")
SCORE = MetricSpec(
    "1",
    True,  # unless the task says otherwise
    "Mean score of the examples of a task of lm-eval, or a number of a metric of evaluate.",
    formula=lambda scores: scores.mean(-1),
    compared="difference",
    scale=1,
)


def metric(
    unit: str = "1",
    *,
    lower_is_better: bool = False,
    compared: Literal["ratio", "difference"] | None = "difference",
    by_example: bool = True,
    **settings: Any,
) -> Callable[[F], F]:
    """Add a function to the table of metrics, with the ``settings`` of ``MetricSpec``."""

    def add(function: F) -> F:
        meaning = inspect.cleandoc(function.__doc__ or "").partition("\n")[0]
        columns = tuple(inspect.signature(function).parameters) if by_example else ()
        spec = MetricSpec(
            unit,
            not lower_is_better,
            meaning,
            function if by_example else None,
            columns,
            compared,
            **settings,
        )
        METRICS.add(function.__name__, spec)
        return function

    return add


@metric(lower_is_better=True, compared="ratio")
def perplexity(nll_nats: Floats, tokens: Floats) -> Any:
    """Exp of the mean loss per token."""
    return np.exp(nll_nats.sum(-1) / tokens.sum(-1))


@metric("bits/byte", lower_is_better=True, compared=None)
def bits_per_byte(nll_nats: Floats, utf8_bytes: Floats) -> Any:
    """Loss per byte of text, which does not depend on the tokenizer."""
    return nll_nats.sum(-1) / (np.log(2) * utf8_bytes.sum(-1))


@metric("nats/token", lower_is_better=True, in_tables=False)
def nll_nats_per_token(nll_nats: Floats, tokens: Floats) -> Any:
    """Mean loss per token: the logarithm of the perplexity."""
    return nll_nats.sum(-1) / tokens.sum(-1)


@metric(proportion=True)
def last_word_accuracy(last_word_hits: Floats) -> Any:
    """Share of the passages whose last word the model predicts."""
    return last_word_hits.mean(-1)


@metric(compared=None, of_two=True, proportion=True, settings=("passage_words",))
def passage_words(passage_word_hits: Floats) -> Any:
    """Accuracy on the last words that the original needs the passage for."""
    return passage_word_hits.mean(-1)


@metric(proportion=True, settings=_NEEDLE)
def needle_accuracy(needle_hits: Floats) -> Any:
    """Share of hidden numbers that the model retrieves from the text."""
    return needle_hits.mean(-1)


@metric("nats/token", lower_is_better=True, settings=_NEEDLE)
def needle_nats(needle_answer_nats: Floats) -> Any:
    """Mean loss per token of the same numbers, which tells small losses."""
    return needle_answer_nats.mean(-1)


@metric(scale=100, settings=_WRITTEN)
def bleu(bleu_counts: Floats) -> Any:
    """BLEU of the written text, by sacrebleu (Post 2018, arXiv 1804.08771)."""
    return _by_sacrebleu("BLEU", bleu_counts)


@metric(scale=100, settings=_WRITTEN)
def chrf(chrf_counts: Floats) -> Any:
    """ChrF of the same, by sacrebleu."""
    return _by_sacrebleu("CHRF", chrf_counts)


@metric(lower_is_better=True, scale=100, settings=_WRITTEN)
def ter(ter_counts: Floats) -> Any:
    """Translation edit rate of the same, by sacrebleu."""
    return _by_sacrebleu("TER", ter_counts)


@metric(scale=1, settings=_WRITTEN)
def rouge1(rouge1_scores: Floats) -> Any:
    """Mean F1 of words that a summary shares with its reference, by rouge_score."""
    return rouge1_scores.mean(-1)


@metric(scale=1, settings=_WRITTEN)
def rouge2(rouge2_scores: Floats) -> Any:
    """The same, of pairs of words."""
    return rouge2_scores.mean(-1)


@metric(scale=1, settings=_WRITTEN)
def rouge_l(rouge_l_scores: Floats) -> Any:
    """The same, of the longest common sequence of words."""
    return rouge_l_scores.mean(-1)


@metric(lower_is_better=True, scale=1, settings=_WRITTEN)
def wer(word_errors: Floats) -> Any:
    """Word errors per word of the references, by jiwer."""
    return _rate(word_errors)


@metric(lower_is_better=True, scale=1, settings=_WRITTEN)
def cer(character_errors: Floats) -> Any:
    """Character errors per character of the references, by jiwer."""
    return _rate(character_errors)


@metric(proportion=True, settings=_WRITTEN)
def exact_match(exact_hits: Floats) -> Any:
    """Share of answers that equal their reference, but for white space around them."""
    return exact_hits.mean(-1)


@metric(proportion=True)
def accuracy(hits: Floats) -> Any:
    """Share of examples whose label, or all of whose labels, are predicted."""
    return hits.mean(-1)


@metric(scale=1)
def macro_f1(class_counts: Floats) -> Any:
    """Mean F1 of the classes that are true or predicted.

    ``class_counts`` has, of every example, flags of the right, the predicted and the true class;
    shape (..., examples, 3 * classes).
    """
    right, said, true = np.split(class_counts.sum(-2), 3, axis=-1)
    either = said + true
    return _share(2 * right, either, 0.0).sum(-1) / np.maximum((either > 0).sum(-1), 1)


@metric(scale=1)
def micro_f1(label_hits: Floats, labels: Floats) -> Any:
    """F1 over all labels of all examples, where an example may have several.

    ``labels`` counts predicted and true labels; F1 is 1 where there are none.
    """
    return _share(2 * label_hits.sum(-1), labels.sum(-1), 1.0)


@metric(scale=1)
def tag_accuracy(tag_hits: Floats, tags: Floats) -> Any:
    """Share of words with the right tag."""
    return tag_hits.sum(-1) / tags.sum(-1)


@metric(scale=1)
def entity_f1(entity_counts: Floats) -> Any:
    """F1 of whole entities of tags such as B-PER and I-PER, by seqeval.

    ``entity_counts`` has right, predicted and true entities; shape (..., examples, 3).
    """
    right, said, true = np.moveaxis(entity_counts.sum(-2), -1, 0)
    return _share(2 * right, said + true, 1.0)


@metric()
def spearman(similarities: Floats, scores: Floats) -> Any:
    """Rank correlation of scores with similarities of sentence pairs, or with predictions."""
    return np.vectorize(rank_correlation, signature="(n),(n)->()")(similarities, scores)


@metric()
def pearson(similarities: Floats, scores: Floats) -> Any:
    """Correlation of the same."""
    x, y = (each - each.mean(-1, keepdims=True) for each in (similarities, scores))
    with np.errstate(invalid="ignore"):  # a resample may hold one value alone
        return (x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1))


@metric(compared=None, of_two=True)
def mean_cosine(cosines: Floats) -> Any:
    """Mean cosine of the embeddings of a text by the model and by its original."""
    return cosines.mean(-1)


@metric(compared=None, of_two=True, by_example=False)
def similarity_correlation(a: Floats, b: Floats) -> float:
    """Correlation of all pairwise similarities of texts, by the model and by its original.

    Args:
        a: Normalised embeddings of texts by one model, shape (texts, hidden).
        b: Embeddings of the same texts by the other.

    Returns:
        Pearson's correlation; NaN where all similarities within a set are the same.
    """
    variances = _covariance(a, a), _covariance(b, b)
    if min(variances) <= _ROUNDING:
        return float("nan")
    return _covariance(a, b) / float(np.sqrt(variances[0] * variances[1]))


METRICS.freeze()


def _share(part: Any, whole: Any, of_none: float) -> Any:
    """Return a share; ``of_none`` where there is nothing. Weighted counts may be less than 1."""
    return np.divide(part, whole, out=np.full(np.shape(whole), of_none), where=whole > 0)


def _by_sacrebleu(name: str, counts: Floats) -> Any:
    from sacrebleu import metrics

    scorer = getattr(metrics, name)()

    def score(sums: Floats) -> float:
        return float(scorer._aggregate_and_compute([sums.tolist()]).score)

    return np.apply_along_axis(score, -1, counts.sum(-2))


def _rate(errors: Floats) -> Any:
    wrong, of = np.moveaxis(errors.sum(-2), -1, 0)
    return wrong / of


_ROUNDING = 1e-12  # variance that rounding in float32 leaves where all similarities are the same


def _covariance(a: Floats, b: Floats) -> float:
    """Covariance of a_i.a_j with b_i.b_j over all pairs i < j.

    The sum of the products over all i and j is |A^T B|^2: no texts x texts matrix is needed.
    """
    n = len(a)
    if n < 2:
        return 0.0
    of_a, of_b = (a * a).sum(1), (b * b).sum(1)
    pairs = n * (n - 1) / 2
    products = (((a.T @ b) ** 2).sum() - of_a @ of_b) / 2
    sums = [((m.sum(0) ** 2).sum() - squares.sum()) / 2 for m, squares in ((a, of_a), (b, of_b))]
    return float(products / pairs - sums[0] * sums[1] / pairs**2)


def rank_correlation(a: Floats, b: Floats) -> float:
    """Spearman's correlation, ties with their mean rank; NaN where all values are the same."""
    x, y = (ranks - ranks.mean() for ranks in (rankdata(a), rankdata(b)))
    norm = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / norm if norm else float("nan")


def within(name: str, domain: str) -> str:
    """Return the name of a metric, or of a column, on a domain; plain on the main one, ""."""
    return f"{name}[{domain}]" if domain else name


def in_k(tokens: int) -> str:
    """Return tokens as names have them: ``512``, or ``2k`` of 2,048."""
    return str(tokens) if tokens % 1024 else f"{tokens // 1024}k"


def context_of(name: str) -> int | None:
    """Return the tokens of ``decode_tokens_per_s@8k``; None where a name has no such context."""
    number = re.fullmatch(r"[^@]*@(\d+)(k?)", name)
    return int(number[1]) * (1024 if number[2] else 1) if number else None


def plain(name: str) -> str:
    """Return a metric without its range or context, and domain: ``perplexity@1k-2k[brown]``."""
    return name.partition("[")[0].partition("@")[0]


def parted(name: str) -> tuple[str, str]:
    """Return a metric, or a column, and its domain: ``perplexity[brown]`` has "brown"."""
    metric, _, domain = name.partition("[")
    return metric, domain.removesuffix("]")


def is_score(name: str) -> bool:
    """Return whether it names a score of a task, as ``lambada_openai:acc`` does."""
    return ":" in name.partition("[")[0]


def spec_of(name: str) -> MetricSpec:
    """Return the row of a metric at any positions, on any domain, or of a score."""
    return SCORE if is_score(name) else METRICS[plain(name)]


def label(name: str) -> str:
    """Return a metric as tables show it: ``perplexity at 1k-2k [brown]``, ``lambada: acc norm``."""
    task, colon, score = name.partition(":")
    if is_score(name):
        return f"{task}{colon} {score.replace('_', ' ')}"
    metric, domain = parted(name)
    return within(metric.replace("_", " ").replace("@", " at "), domain).replace("[", " [")


@dataclass(frozen=True)
class Samples:
    """Numbers per sequence or example, and the metrics that are functions of them.

    Attributes:
        columns: By name, of shape (sequences,), or (sequences, counts). A column of a further
            domain has its name in brackets (``nll_nats[brown]``), one of a range of positions the
            range (``nll_nats@1k-2k``), as its metrics do. A column of a task of lm-eval is a score
            itself (``lambada_openai:acc``).
        documents: By column, the number of the document that each window of a text begins in;
            columns of independent rows are absent.
    """

    columns: Columns
    documents: Mapping[str, Numbers] = field(default_factory=dict)

    def metrics(self) -> tuple[str, ...]:
        """Return the metrics that the columns give."""
        places = dict.fromkeys(column.removeprefix(plain(column)) for column in self.columns)
        names = (
            f"{name}{place}"
            for place in places
            for name, spec in METRICS.items()
            if spec.formula is not None and (spec.in_tables or "@" not in place)
        )
        complete = [name for name in names if set(columns_of(name)) <= set(self.columns)]
        return (*complete, *filter(is_score, self.columns))

    def count(self, metric: str) -> int:
        """Return the number of sequences or examples behind a metric."""
        return len(self.columns[columns_of(metric)[0]])

    def documents_of(self, metric: str) -> Numbers | None:
        """Return the documents of the windows behind a metric; None for independent rows."""
        names = columns_of(metric)
        return next((self.documents[name] for name in names if name in self.documents), None)

    def statistic(self, metric: str) -> Statistic:
        """Return a metric as a function of the indices of the sequences that count."""
        formula, columns = spec_of(metric).formula, [self.columns[n] for n in columns_of(metric)]
        assert formula is not None  # see ``metrics``
        return lambda i: formula(*(column[i] for column in columns))

    def weighted(self, metric: str) -> Weighted:
        """Return a metric with a scale as a function of weights, of mean 1."""
        formula, columns = spec_of(metric).formula, [self.columns[n] for n in columns_of(metric)]
        assert formula is not None
        return lambda w: formula(*(x * (w if x.ndim == 1 else w[..., None]) for x in columns))

    def value(self, metric: str) -> float:
        """Return a metric of all sequences; NaN or infinite where there is nothing to divide by."""
        with np.errstate(all="ignore"):
            return float(self.statistic(metric)(np.arange(self.count(metric))))

    def outcomes(self, metric: str) -> Outcomes | None:
        """Return which trials of a proportion succeed; None for any other metric."""
        first = self.columns[columns_of(metric)[0]]
        share = is_score(metric) and np.isin(first, (0, 1)).all()
        return np.asarray(first == 1) if share or spec_of(metric).proportion else None


def columns_of(name: str) -> list[str]:
    """Return the columns that a metric is a function of."""
    if is_score(name):
        return [name]
    place = name.removeprefix(plain(name))
    return [f"{column}{place}" for column in METRICS[plain(name)].columns]


def interval_of(
    metric: str,
    number: Callable[[Any, Any], Any],
    ours: Samples,
    theirs: Samples | None,
    resamples: int,
    confidence: float,
    seed: int,
) -> Interval:
    """Return the interval of a metric, or of its comparison with a base on the same examples.

    Args:
        metric: The metric.
        number: From the values of model and base to the number.
        ours: Samples of the model.
        theirs: Those of the base; None for the metric itself.
        resamples: Number of resamples.
        confidence: Level, between 0 and 1.
        seed: Seed of the resampling.

    Returns:
        The interval; its ends are NaN where the examples are too few to show any difference.
    """
    mine, base = (None if each is None else each.outcomes(metric) for each in (ours, theirs))
    if mine is not None and (theirs is None or base is not None):
        return of_shares(number, mine, base, resamples, confidence, seed)
    n, sides, how = ours.count(metric), (ours, theirs or ours), (resamples, confidence, seed)
    value, other = (side.statistic(metric) for side in sides)
    if (scale := spec_of(metric).scale) is not None:
        with np.errstate(all="ignore"):  # error rates and scores of tasks may exceed the scale
            alone = np.concatenate([of(np.arange(n)[:, None]) for of in (value, other)])
        alone = alone[np.isfinite(alone)]
        ends = alone.min(initial=0), alone.max(initial=scale)
        return of_bounded(number, [side.weighted(metric) for side in sides], ends, n, *how)
    documents = ours.documents_of(metric)

    def statistic(indices: Any) -> Any:
        return number(value(indices), other(indices))

    found = bootstrap(statistic, n, *how, documents)
    if n < FEWEST and math.isclose(found.low, found.high, rel_tol=1e-9, abs_tol=1e-12):
        return replace(found, low=math.nan, high=math.nan)
    if theirs is None:
        return found
    return of_skewed(found, statistic, resamples, seed, documents)
