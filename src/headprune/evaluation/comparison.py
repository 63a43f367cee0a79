"""Is the difference between two models real? Paired bootstrap over windows or examples.

Both models are measured on the same windows; a resample draws windows, not models, so what the
windows have in common cancels (Efron and Tibshirani 1993, ch. 8 and 13: percentile intervals).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Statistic = Callable[[NDArray[np.int64]], float]


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval.

    Attributes:
        estimate: On all windows.
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


def bootstrap(
    statistic: Statistic, n: int, resamples: int, confidence: float, seed: int
) -> Interval:
    """Percentile interval of a statistic of paired data.

    Args:
        statistic: Maps indices of windows (with repeats) to a number.
        n: Number of windows.
        resamples: Number of resamples.
        confidence: Level, between 0 and 1.
        seed: Seed of the resampling.
    """
    generator = np.random.default_rng(seed)
    draws = [statistic(generator.integers(0, n, n)) for _ in range(resamples)]
    tail = (1 - confidence) / 2
    low, high = np.nanquantile(draws, [tail, 1 - tail])
    return Interval(statistic(np.arange(n)), float(low), float(high), confidence, n)
