"""Units of removal and of windows: which query heads stand or fall together.

With 6 query heads on 2 KV heads, heads 0-2 share the first KV head and heads 3-5 the second:

    head        0 | 1 | 2 | 3 | 4 | 5      any head; groups may become ragged
    kv-group    0 1 2 | 3 4 5              a KV head with all its queries: the cache shrinks
    query-slot  0 3 | 1 4 | 2 5            the same position of every group: groups stay equal
    layer       0 1 2 3 4 5                all heads of a module; a unit of windows only
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum


class Unit(str, Enum):
    """A unit of removal or of windows."""

    HEAD = "head"
    KV_GROUP = "kv-group"
    QUERY_SLOT = "query-slot"
    LAYER = "layer"


def members(unit: Unit, group_sizes: Sequence[int]) -> list[list[int]]:
    """Lists the query-head positions of every unit of one attention.

    Args:
        unit: The unit.
        group_sizes: Query heads of every KV head, in order.

    Returns:
        One ascending list per unit; together they hold every position exactly once.
    """
    starts = [sum(group_sizes[:group]) for group in range(len(group_sizes))]
    if unit is Unit.HEAD:
        return [[h] for h in range(sum(group_sizes))]
    groups = [
        list(range(start, start + size)) for start, size in zip(starts, group_sizes, strict=True)
    ]
    if unit is Unit.KV_GROUP:
        return groups
    if unit is Unit.LAYER:
        return [list(range(sum(group_sizes)))] if group_sizes else []
    slots = max(group_sizes, default=0)
    return [[group[slot] for group in groups if slot < len(group)] for slot in range(slots)]
