"""Spreading a budget of KV heads over layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def exactly(costs: Sequence[Mapping[int, float]], budget: int) -> list[int]:
    """The counts, one per module, with the least sum of costs that come to a budget. Exact.

    Args:
        costs: Per module, what each possible number of KV heads costs.
        budget: KV heads of all modules together.

    Raises:
        ValueError: If no counts come to it; it says which totals are nearest.
    """
    known = _best(costs)
    if budget not in known:
        below = max((total for total in known if total < budget), default=None)
        above = min((total for total in known if total > budget), default=None)
        near = " and ".join(str(total) for total in (below, above) if total is not None)
        raise ValueError(f"{budget} KV heads, which no choice comes to; the nearest: {near}")
    return known[budget][1]


def _best(costs: Sequence[Mapping[int, float]]) -> dict[int, tuple[float, list[int]]]:
    """Per total that counts can come to, the least sum of costs, and its counts."""
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for module in costs:
        after: dict[int, tuple[float, list[int]]] = {}
        for used, (cost, counts) in best.items():
            for count, extra in module.items():
                total = used + count
                if cost + extra < after.get(total, (math.inf, []))[0]:
                    after[total] = (cost + extra, [*counts, count])
        best = after
    return best
