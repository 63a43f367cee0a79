"""Units of removal: which query heads stand or fall together.

With 6 query heads on 2 KV heads, heads 0-2 share the first KV head and heads 3-5 the second:

    head        0 | 1 | 2 | 3 | 4 | 5      any head; groups may become ragged
    kv-group    0 1 2 | 3 4 5              a KV head with all its queries: the cache shrinks
    query-slot  0 3 | 1 4 | 2 5            the same position of every group: groups stay equal
"""

from __future__ import annotations

from enum import Enum


class Unit(str, Enum):
    """What is removed as one piece."""

    HEAD = "head"
    KV_GROUP = "kv-group"
    QUERY_SLOT = "query-slot"


def members(unit: Unit, query_heads: int, kv_heads: int) -> list[list[int]]:
    """Lists the query-head positions of every unit of one attention.

    Args:
        unit: The unit of removal.
        query_heads: Number of query heads; a multiple of ``kv_heads``.
        kv_heads: Number of key/value heads.

    Returns:
        One ascending list per unit; together they hold every position exactly once.
    """
    if query_heads == 0:
        return []
    group = query_heads // kv_heads
    if unit is Unit.HEAD:
        return [[h] for h in range(query_heads)]
    if unit is Unit.KV_GROUP:
        return [list(range(g * group, (g + 1) * group)) for g in range(kv_heads)]
    return [list(range(slot, query_heads, group)) for slot in range(group)]
