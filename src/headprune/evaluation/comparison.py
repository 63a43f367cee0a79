"""Is the difference between two models real? Paired bootstrap over sequences or examples.

Both models are measured on the same sequences; a resample draws sequences, not models, so what the
sequences have in common cancels (Efron and Tibshirani 1993, ch. 8 and 13: percentile intervals).
With few sequences these are too short; their tails are moved out as far as Student's t is wider
than the normal distribution (Hesterberg 2015, arXiv 1411.5279, section 5.3: expanded percentiles).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Maps indices of sequences, shape (..., sequences), to one number each, shape (...).
Statistic = Callable[[NDArray[np.int64]], Any]

_DRAWN_AT_ONCE = 1 << 18  # indices: more do not go faster, and take memory


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval.

    Attributes:
        estimate: On all sequences.
        low: Lower end.
        high: Upper end.
        confidence: Level of the interval.
        n: Windows or examples that were resampled.
    """

    estimate: float
    low: float
    high: float
    confidence: float
    n: int

    @property
    def is_finite(self) -> bool:
        """Whether estimate and ends are numbers."""
        return all(map(math.isfinite, (self.estimate, self.low, self.high)))


def bootstrap(
    statistic: Statistic, n: int, resamples: int, confidence: float, seed: int
) -> Interval:
    """Expanded percentile interval of a statistic of paired data.

    Args:
        statistic: Maps indices of sequences (with repeats) to a number; many resamples at once,
            one a row.
        n: Number of sequences.
        resamples: Number of resamples.
        confidence: Level, between 0 and 1.
        seed: Seed of the resampling. Resamples in which the statistic is NaN do not count.
    """
    generator = np.random.default_rng(seed)
    rows = max(1, _DRAWN_AT_ONCE // n)
    with np.errstate(divide="ignore", invalid="ignore"):  # resamples without anything to count
        draws = [
            np.asarray(statistic(generator.integers(0, n, (min(rows, resamples - start), n))))
            for start in range(0, resamples, rows)
        ]
    tail = _expanded_tail((1 - confidence) / 2, n)
    drawn = np.concatenate(draws)
    drawn = drawn[~np.isnan(drawn)]
    # of two infinite neighbours the one between is none
    with np.errstate(invalid="ignore"):
        low, high = np.quantile(drawn, [tail, 1 - tail]) if len(drawn) else (np.nan, np.nan)
    return Interval(float(statistic(np.arange(n))), float(low), float(high), confidence, n)


def _expanded_tail(tail: float, n: int) -> float:
    """Phi(-sqrt(n / (n - 1)) t), t being the quantile of Student's t with n - 1 degrees of freedom.

    The quantile is the expansion around the normal one, z, in powers of 1 / (n - 1).
    """
    if n < 2:
        return tail
    z, free = NormalDist().inv_cdf(1 - tail), n - 1
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * free**3)
    return NormalDist().cdf(-math.sqrt(n / free) * t)
