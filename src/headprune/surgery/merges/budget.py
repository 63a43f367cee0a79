"""Spreading a budget of KV heads over layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def spread(costs: Sequence[Mapping[int, float]], budget: int) -> list[int]:
    """The counts, one per module, with the least sum of costs that stay within a budget. Exact.

    Args:
        costs: Per module, what each possible number of KV heads costs.
        budget: KV heads of all modules together.

    Raises:
        ValueError: If even the smallest counts are more than the budget.
    """
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for module in costs:
        after: dict[int, tuple[float, list[int]]] = {}
        for used, (cost, counts) in best.items():
            for count, extra in module.items():
                total = used + count
                if total <= budget and cost + extra < after.get(total, (math.inf, []))[0]:
                    after[total] = (cost + extra, [*counts, count])
        best = after
    if not best:
        raise ValueError(f"{budget} KV heads are fewer than one per module")
    return min(best.values(), key=lambda found: (found[0], sum(found[1])))[1]
