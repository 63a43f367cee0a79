"""Zero heads: they add nothing to an attention's output, and make its shape regular."""

from __future__ import annotations

from collections.abc import Sequence

Slots = tuple[int | None, ...]
"""Per head of the result, the present head that it is; None for a zero head."""


def padded(group_sizes: Sequence[int], size: int) -> tuple[Slots, Slots]:
    """Return places of zero heads, so that all KV heads have equally many queries, and one exists.

    Args:
        group_sizes: Query heads of every KV head, in order; empty for a layer without heads.
        size: Query heads that each one gets.

    Returns:
        The query heads, and the KV heads. Each zero query head is the last of its group.
    """
    if not group_sizes:
        return (None,) * size, (None,)
    queries: list[int | None] = []
    start = 0
    for present in group_sizes:
        queries += [*range(start, start + present), *[None] * (size - present)]
        start += present
    return tuple(queries), tuple(range(len(group_sizes)))


def divisible(group_sizes: Sequence[int], by: int) -> tuple[Slots, Slots]:
    """Return places of heads so that query heads and KV heads divide by a number.

    A KV head may be there several times, each with a part of its queries. Of all ways, the one with
    the fewest KV heads is taken, and of these the one with the fewest query heads.

    Args:
        group_sizes: Query heads of every KV head, in order.
        by: The number.

    Returns:
        The query heads, and the KV heads.
    """
    largest = max(group_sizes, default=1)

    def counts(copies: int) -> tuple[int, int, int]:
        kv_heads = -(-max(len(group_sizes) * copies, 1) // by) * by
        return kv_heads, kv_heads * -(-largest // copies), copies

    kv_heads, queries, copies = min(counts(each) for each in range(1, largest + 1))
    size = queries // kv_heads
    query_slots, kv_slots, start = [], [], 0
    for number, present in enumerate(group_sizes):
        heads: list[int | None] = [*range(start, start + present)]
        query_slots += [*heads, *[None] * (copies * size - present)]
        kv_slots += [number] * copies
        start += present
    more = kv_heads - len(kv_slots)
    return (*query_slots, *[None] * (more * size)), (*kv_slots, *[None] * more)
