"""From evidence and a budget to a plan."""

from __future__ import annotations

from collections.abc import Sequence

from headprune.errors import PlanError
from headprune.registry import did_you_mean
from headprune.runtime.modeling_headprune import Attention
from headprune.tensors.selection import attainable
from headprune.tensors.units import Unit, members


def default_unit(attentions: Sequence[Attention]) -> Unit:
    """A head where every query has its own KV head or all share one, else a KV head's queries."""
    grouped = any(a.query_heads != a.kv_heads and a.kv_heads > 1 for a in attentions)
    return Unit.KV_GROUP if grouped else Unit.HEAD


def leaves_ragged(attentions: Sequence[Attention], unit: Unit) -> bool:
    """Whether cutting by a unit may leave KV heads with unequal numbers of queries."""
    return unit is Unit.HEAD and default_unit(attentions) is not Unit.HEAD


def unit_sizes(attentions: Sequence[Attention], unit: Unit) -> list[int]:
    """Query heads per unit, for all units of all modules in order."""
    return [len(m) for a in attentions for m in members(unit, a.group_sizes)]


def modules_of(
    attentions: Sequence[Attention], names: Sequence[str], evidence: str
) -> list[Attention]:
    """Return the attention modules of gates or scores, by path.

    Raises:
        PlanError: If the model has no such module.
    """
    present = {attention.path: attention for attention in attentions}
    for name in names:
        if name not in present:
            raise PlanError(
                f"The {evidence} are of '{name}', an attention module that this model does not "
                f"have.{did_you_mean(name, list(present))} Give the model they were made on."
            )
    return [present[name] for name in names]


def refuse_target(target: float | int | None) -> None:
    """Refuses a share or count of heads that no model can keep.

    Raises:
        PlanError: If it is out of range.
    """
    if isinstance(target, float) and not 0 <= target <= 1:
        raise PlanError(
            f"The share of heads to keep must lie between 0 and 1, not {target}. For a count, give "
            "a whole number."
        )
    if isinstance(target, int) and target < 0:
        raise PlanError(f"The number of heads to keep must not be negative, and {target} is.")


def head_budget(target: float | int, sizes: Sequence[int]) -> int:
    """The number of query heads to keep.

    Args:
        target: A share (a float up to 1.0), rounded to the nearest count that whole units reach,
            or a count (an int), which they must reach exactly.
        sizes: Query heads per unit.

    Raises:
        PlanError: If the target is out of range, or a count cannot be hit.
    """
    total, counts = sum(sizes), sorted(attainable(sizes))
    refuse_target(target)
    if isinstance(target, float):
        return min(counts, key=lambda count: (abs(count - target * total), count))
    if target > total:
        raise PlanError(f"The model has {total} query heads; {target} cannot be kept.")
    if target not in counts:
        below = max(c for c in counts if c < target)
        above = min(c for c in counts if c > target)
        raise PlanError(
            f"A count of {target} cannot be kept exactly: the units hold {_sizes(sizes)} query "
            f"heads each. The nearest counts are {below} and {above}; --unit head removes single "
            "heads."
        )
    return target


def _sizes(sizes: Sequence[int]) -> str:
    return " or ".join(map(str, sorted(set(sizes))))
