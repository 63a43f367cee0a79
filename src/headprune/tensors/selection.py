"""Exact selection under a budget."""

from __future__ import annotations

from collections.abc import Sequence


def attainable(sizes: Sequence[int]) -> set[int]:
    """The totals that some subset of ``sizes`` adds up to."""
    totals = {0}
    for size in sizes:
        totals |= {total + size for total in totals}
    return totals


def keep_best(scores: Sequence[float], sizes: Sequence[int], budget: int) -> list[int]:
    """Keeps the best-scored units whose sizes add up to exactly ``budget``.

    Units are taken from the best score downwards (ties: the lower index first); one that would
    make the budget unreachable is passed over. Selection is by rank, never by a threshold, so a
    budget of 0 keeps nothing and a budget of ``sum(sizes)`` keeps everything.

    Args:
        scores: One score per unit; higher is kept first.
        sizes: Heads per unit, >= 1.
        budget: Heads to keep.

    Returns:
        Ascending indices of the kept units.

    Raises:
        ValueError: If no subset of the units adds up to ``budget``.
    """
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    # reach[r]: totals that the units from rank r on can still add up to
    reach: list[set[int]] = [{0}]
    for index in reversed(ranked):
        size = sizes[index]
        reach.append(reach[-1] | {t + size for t in reach[-1] if t + size <= budget})
    reach.reverse()
    if budget not in reach[0]:
        raise ValueError(f"no set of units has exactly {budget} heads")
    kept, left = [], budget
    for rank, index in enumerate(ranked):
        if left - sizes[index] in reach[rank + 1]:
            kept.append(index)
            left -= sizes[index]
    return sorted(kept)
