"""How many KV heads every attention module gets: as they were stated, equal, or within a budget."""

from __future__ import annotations

from collections.abc import Sequence

from headprune.errors import PlanError
from headprune.runtime.modeling_headprune import Attention
from headprune.surgery.merges.budget import spread


def stated_counts(
    asked: int | tuple[int, ...], attentions: Sequence[Attention], devices: int = 1
) -> list[int]:
    """The counts that were asked for: one number for all modules, or one for each.

    Raises:
        PlanError: If there are more or fewer than modules, one leaves unequal groups, or devices
            cannot share it.
    """
    counts = [asked] * len(attentions) if isinstance(asked, int) else list(asked)
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
        if count % devices:
            shared = ", ".join(map(str, fitting(attention, devices)))
            raise PlanError(
                f"--tensor-parallel {devices}: so many devices cannot share the {count} KV heads "
                f"that --kv-heads leaves '{attention.path}'. Possible: {shared or 'none'}."
            )
    return counts


def equal_counts(share: float, attentions: Sequence[Attention], devices: int = 1) -> list[int]:
    """The largest number of KV heads within a budget that all modules can have alike; one at least.

    Raises:
        PlanError: If devices cannot share any number within the budget.
    """
    common = set.intersection(*(set(fitting(attention, devices)) for attention in attentions))
    mean = sum(attention.kv_heads for attention in attentions) / len(attentions)
    within = [count for count in common if count <= max(share * mean, 1)]
    if not within:
        least = f"the least is {min(common) / mean:.3f}" if common else "none is possible"
        raise PlanError(
            f"--tensor-parallel {devices}: --kv-budget {share} has no equal number of KV heads per "
            f"layer that so many devices share; {least}."
        )
    return [max(within)] * len(attentions)


def fitting(attention: Attention, devices: int = 1) -> list[int]:
    """Numbers of KV heads that leave groups of equal size, and that devices share equally."""
    heads = attention.kv_heads
    return [count for count in range(devices, heads + 1, devices) if heads % count == 0]


def spread_counts(
    share: float, attentions: Sequence[Attention], costs: Sequence[dict[int, float]]
) -> list[int]:
    """The counts within a budget whose costs add up to least.

    Args:
        share: Of all KV heads, how many may stay.
        attentions: The modules.
        costs: Per module, what each possible number of KV heads costs.

    Raises:
        PlanError: If the budget has fewer than all modules must keep.
    """
    total = sum(attention.kv_heads for attention in attentions)
    budget = round(share * total)
    try:
        return spread(costs, budget)
    except ValueError:
        least = sum(map(min, costs))
        raise PlanError(
            f"--kv-budget {share} keeps {budget} of {total} KV heads, fewer than the {least} that "
            f"{len(attentions)} attention modules keep at least; the least is {least / total:.3f}."
        ) from None
