"""Numbers of KV heads of every attention module: stated, or equal."""

from __future__ import annotations

from collections.abc import Sequence

from headprune.errors import PlanError
from headprune.runtime.modeling_headprune import Attention


def stated_counts(kv_heads: int | tuple[int, ...], attentions: Sequence[Attention]) -> list[int]:
    """Return the KV heads of each module, from one number for all or one for each.

    Raises:
        PlanError: If their number is not that of the modules, or one leaves unequal groups.
    """
    counts = [kv_heads] * len(attentions) if isinstance(kv_heads, int) else list(kv_heads)
    if len(counts) != len(attentions):
        raise PlanError(
            f"--kv-heads lists {len(counts)} numbers; the model has {len(attentions)} attention "
            "modules to convert."
        )
    for attention, count in zip(attentions, counts, strict=True):
        fits = fitting(attention)
        if count not in fits:
            more = count > attention.kv_heads
            raise PlanError(
                f"'{attention.path}' has {attention.kv_heads} KV heads, "
                + (f"fewer than {count}." if more else f"which {count} does not divide.")
                + f" Possible: {', '.join(map(str, fits))}."
            )
    return counts


def equal_counts(share: float, attentions: Sequence[Attention]) -> list[int]:
    """Return the largest equal number of KV heads within a budget, at least one.

    Args:
        share: Fraction of the KV heads that may stay.
        attentions: The modules.
    """
    common = set.intersection(*(set(fitting(attention)) for attention in attentions))
    mean = sum(attention.kv_heads for attention in attentions) / len(attentions)
    return [max(count for count in common if count <= max(share * mean, 1))] * len(attentions)


def fitting(attention: Attention) -> list[int]:
    """Return the numbers of KV heads that leave groups of equal size."""
    heads = attention.kv_heads
    return [count for count in range(1, heads + 1) if heads % count == 0]
