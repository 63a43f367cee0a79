"""Exact selection under a budget."""

from __future__ import annotations

from collections.abc import Sequence


def attainable(sizes: Sequence[int]) -> set[int]:
    """Return the totals that some subset of ``sizes`` adds up to."""
    reach = 1  # bit t: some subset adds up to t
    for size in sizes:
        reach |= reach << size
    return {total for total, bit in enumerate(reversed(f"{reach:b}")) if bit == "1"}


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
    # bit t of reach[r]: the units from rank r on can add up to t
    reach, mask = [1], (1 << max(budget, 0) + 1) - 1
    for index in reversed(ranked):
        reach.append(reach[-1] | reach[-1] << sizes[index] & mask)
    reach.reverse()
    if budget < 0 or not reach[0] >> budget & 1:
        raise ValueError(f"no set of units has exactly {budget} heads")
    kept, left = [], budget
    for rank, index in enumerate(ranked):
        rest = left - sizes[index]
        if rest >= 0 and reach[rank + 1] >> rest & 1:
            kept.append(index)
            left -= sizes[index]
    return sorted(kept)
