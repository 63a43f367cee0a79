"""Intervals of metrics and of differences: paired bootstrap over sequences or examples.

Both models are measured on the same sequences; a resample draws sequences, not models. Their common
part cancels (Efron and Tibshirani 1993, ch. 8 and 13: percentile intervals).

    documents   windows of one document are drawn together
    blocks      of a running text: neighbouring windows are drawn together (Kuensch 1989), in few
                long blocks: shorter ones lose what neighbours have in common

With few draws these intervals are too short; their tails are moved out as far as Student's t is
wider than the normal distribution (Hesterberg 2015, arXiv 1411.5279, section 5.3: expanded
percentiles). Of fewer than ten, the interval is Student's with the jackknife's standard error.

No resample can show an outcome that the sample lacks. Where values have a lowest and a highest one,
each end counts one more pair, the best or the worst possible. Weights are drawn, not examples
(Gaffke 2005; Learned-Miller and Thomas 2020, arXiv 1905.06208). Of a single
share this is the interval of Clopper and Pearson. Where the examples of a metric differ in length,
the further one has their mean length. Losses have no highest value: there, one more run counts that
is twice as far off as the farthest, where models are compared. What no run hints at stays unseen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest, norm, t

from headprune.data.text import evenly

Numbers = NDArray[np.int64]
Outcomes = NDArray[np.bool_]
Floats = NDArray[np.float64]
# Maps indices of sequences, shape (..., sequences), to one number each, shape (...).
Statistic = Callable[[Numbers], Any]
Weighted = Callable[[Floats], Any]  # the same of their weights, of mean 1

FEWEST = 10  # draws: resamples of fewer differ too little from each other
_DRAWN_AT_ONCE = 1 << 18  # indices: more are no faster, and take memory


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval.

    Attributes:
        estimate: On all sequences.
        low: Lower end.
        high: Upper end.
        confidence: Level of the interval.
        n: Resampled windows or examples.
    """

    estimate: float
    low: float
    high: float
    confidence: float
    n: int

    @property
    def is_finite(self) -> bool:
        """True if estimate and ends are numbers."""
        return all(map(math.isfinite, (self.estimate, self.low, self.high)))


def bootstrap(
    statistic: Statistic,
    n: int,
    resamples: int,
    confidence: float,
    seed: int,
    documents: Numbers | None = None,
) -> Interval:
    """Return the interval of a statistic of paired data.

    Args:
        statistic: Maps indices of sequences (with repeats) to a number; many resamples at once,
            one a row.
        n: Number of sequences.
        resamples: Number of resamples; those whose statistic is NaN do not count.
        confidence: Level, between 0 and 1.
        seed: Seed of the resampling.
        documents: Of neighbouring windows, the number of the document that each begins in; None
            for independent sequences.
    """
    starts = _starts(n, documents)
    tail, units = (1 - confidence) / 2, len(starts)
    estimate = float(statistic(np.arange(n)))
    if 2 <= units < FEWEST:
        half = t.ppf(1 - tail, units - 1) * _jackknife(statistic, n, starts)
        if math.isfinite(half):
            return Interval(estimate, estimate - half, estimate + half, confidence, n)
    generator = np.random.default_rng(seed)
    rows = max(1, _DRAWN_AT_ONCE // n)
    with np.errstate(divide="ignore", invalid="ignore"):  # resamples without anything to count
        draws = [
            np.asarray(statistic(_drawn(generator, starts, n, min(rows, resamples - done))))
            for done in range(0, resamples, rows)
        ]
    if units > 1:
        tail = norm.cdf(-math.sqrt(units / (units - 1)) * t.ppf(1 - tail, units - 1))
    drawn = np.concatenate(draws)
    drawn = drawn[~np.isnan(drawn)]
    with np.errstate(invalid="ignore"):  # between two infinite neighbours lies NaN
        low, high = np.quantile(drawn, [tail, 1 - tail]) if len(drawn) else (np.nan, np.nan)
    return Interval(estimate, float(low), float(high), confidence, n)


def of_shares(
    number: Callable[[Any, Any], Any],
    ours: Outcomes,
    theirs: Outcomes | None,
    resamples: int,
    confidence: float,
    seed: int,
) -> Interval:
    """Return the interval of a number of two shares of successes, of paired trials.

    Args:
        number: From the shares of model and base to the number.
        ours: Successes of the model.
        theirs: Those of the base in the same trials; None for the share of the model alone.
        resamples: Number of drawn weights.
        confidence: Level, between 0 and 1.
        seed: Seed of the weights.
    """
    if theirs is None:
        exact = binomtest(int(ours.sum()), len(ours)).proportion_ci(confidence)
        return Interval(float(ours.mean()), exact.low, exact.high, confidence, len(ours))
    generator, tail = np.random.default_rng(seed), (1 - confidence) / 2
    cells = [ours & theirs, ours & ~theirs, ~ours & theirs, ~(ours | theirs)]
    weights = generator.standard_gamma([cell.sum() for cell in cells], (resamples, 4))
    further = generator.standard_exponential((resamples, 1))
    ends = []
    for which in (1, 2):  # the further pair: the model alone is right, or alone is wrong
        both, gained, lost, neither = (weights + further * (np.arange(4) == which)).T
        total = both + gained + lost + neither
        with np.errstate(divide="ignore", invalid="ignore"):  # a base without successes
            drawn = number((both + gained) / total, (both + lost) / total)
            ends.append(np.quantile(drawn, [tail, 1 - tail]))
    with np.errstate(divide="ignore", invalid="ignore"):
        estimate = float(number(ours.mean(), theirs.mean()))
    low, high = float(np.min(ends)), float(np.max(ends))
    return Interval(estimate, low, high, confidence, len(ours))


def of_bounded(
    number: Callable[[Any, Any], Any],
    sides: Sequence[Weighted],
    ends: tuple[float, float],
    n: int,
    resamples: int,
    confidence: float,
    seed: int,
) -> Interval:
    """Return the interval of a number of two metrics with a lowest and a highest value.

    Args:
        number: From the values of model and base to the number.
        sides: From weights of the examples, of mean 1, to the metric of the model; and of the base.
        ends: The values of the worst and the best possible example, in either order.
        n: Number of examples.
        resamples: Number of drawn weights.
        confidence: Level, between 0 and 1.
        seed: Seed of the weights.
    """
    drawn: list[list[Any]] = [[], []]
    with np.errstate(divide="ignore", invalid="ignore"):  # a base of nothing
        for weights, share in _weights(np.random.default_rng(seed), n, resamples):
            model, base = ((1 - share) * of(weights) for of in sides)
            for found, (mine, other) in zip(drawn, (ends, ends[::-1]), strict=True):
                found.append(number(model + share * mine, base + share * other))
        estimate = float(number(*(of(np.ones(n)) for of in sides)))
        tail = (1 - confidence) / 2
        found = [np.quantile(np.concatenate(one), [tail, 1 - tail]) for one in drawn]
    return Interval(estimate, float(np.min(found)), float(np.max(found)), confidence, n)


def of_skewed(
    found: Interval,
    statistic: Statistic,
    resamples: int,
    seed: int,
    documents: Numbers | None = None,
) -> Interval:
    """Widen an interval by a further run, twice as far from the estimate as the farthest seen.

    Where a single run has no number, as of a correlation, the interval stays.

    Args:
        found: The interval.
        statistic: See ``bootstrap``, as for the others.
        resamples: Number of drawn weights.
        seed: Seed of the weights.
        documents: See ``bootstrap``.
    """
    starts = _starts(found.n, documents)
    with np.errstate(all="ignore"):
        if len(starts) == found.n:
            alone = statistic(starts[:, None])
        else:
            alone = [float(statistic(run)) for run in np.split(np.arange(found.n), starts[1:])]
        apart = np.asarray(alone) - found.estimate
    if not np.isfinite(apart).all():
        return found
    tail, far, draws = (1 - found.confidence) / 2, 2 * np.abs(apart).max(), []
    for weights, share in _weights(np.random.default_rng(seed), len(apart), resamples):
        inner = (1 - share) * (weights @ (apart - apart.mean())) / len(apart)
        draws.append((inner - share * far, inner + share * far))
    below, above = map(np.concatenate, zip(*draws, strict=True))
    low = found.estimate + float(np.quantile(below, tail))
    high = found.estimate + float(np.quantile(above, 1 - tail))
    return replace(found, low=min(found.low, low), high=max(found.high, high))


def _weights(
    generator: np.random.Generator, n: int, resamples: int
) -> Iterator[tuple[Floats, Floats]]:
    """Draw weights of n examples, of mean 1, and the share that one further example has."""
    rows = max(1, _DRAWN_AT_ONCE // n)
    for done in range(0, resamples, rows):
        drawn = generator.standard_exponential((min(rows, resamples - done), n + 1))
        share, seen = drawn[:, n] / drawn.sum(1), drawn[:, :n]
        yield seen / seen.mean(1, keepdims=True), share


def _starts(n: int, documents: Numbers | None) -> Numbers:
    """Return the first sequence of every run to draw as a whole."""
    if documents is None:
        return np.arange(n)
    starts = np.flatnonzero(np.diff(documents, prepend=documents[0] - 1))
    if len(starts) > 1:  # of two, Student's t has one degree of freedom: wide, as it must be
        return starts
    return np.array(evenly(n, min(n, max(5, int(0.7 * n**0.5)))))


def _drawn(generator: np.random.Generator, starts: Numbers, n: int, rows: int) -> Numbers:
    """Draw runs, one after the other, until a resample has n sequences; shape (rows, n)."""
    if len(starts) == n:
        return generator.integers(0, n, (rows, n))
    sizes = np.diff(starts, append=n)
    drawn = generator.integers(0, len(starts), (rows, -(-n // int(sizes.min()))))
    places = sizes[drawn].cumsum(1) - sizes[drawn]  # in the resample
    begins = np.zeros((rows, n), np.int64)
    row, which = np.nonzero(places < n)
    begins[row, places[row, which]] = 1
    run = begins.cumsum(1) - 1
    first, place = (np.take_along_axis(of, run, 1) for of in (starts[drawn], places))
    indices: Numbers = first + np.arange(n) - place
    return indices


def _jackknife(statistic: Statistic, n: int, starts: Numbers) -> float:
    """Return the standard error by leaving out one run after the other."""
    runs = np.split(np.arange(n), starts[1:])
    with np.errstate(all="ignore"):
        left = np.array([float(statistic(np.delete(np.arange(n), run))) for run in runs])
        return float(math.sqrt(len(runs) - 1) * left.std())
