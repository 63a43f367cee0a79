"""Units of removal, head budgets, and the modules of gates and scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from headprune.errors import PlanError
from headprune.model.attention import attention_of
from headprune.registry import did_you_mean
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.gates import TrainedGates, read_gates
from headprune.schemas.plan import ModelIdentity
from headprune.schemas.scores import Scores
from headprune.tensors.selection import attainable
from headprune.tensors.units import Unit, members


def default_unit(attentions: Sequence[Attention]) -> Unit:
    """Return "head" for MHA and MQA, and "kv_group" (a KV head and its queries) for GQA."""
    grouped = any(a.query_heads != a.kv_heads and a.kv_heads > 1 for a in attentions)
    return Unit.KV_GROUP if grouped else Unit.HEAD


def leaves_ragged(attentions: Sequence[Attention], unit: Unit) -> bool:
    """Return whether cutting by a unit may leave KV heads with unequal numbers of queries."""
    return unit is Unit.HEAD and default_unit(attentions) is not Unit.HEAD


def unit_sizes(attentions: Sequence[Attention], unit: Unit) -> list[int]:
    """Return the query heads of every unit, for all modules in order."""
    return [len(m) for a in attentions for m in members(unit, a.group_sizes)]


def fitted_gates(
    net: PreTrainedModel, source: ModelIdentity, folder: Path
) -> tuple[TrainedGates, list[Attention]]:
    """Read the gates of a model, and return them with their modules.

    Raises:
        CheckpointError: If the folder holds no finished gates.
        PlanError: If they do not fit the model.
    """
    trained = read_gates(folder, source)
    return trained, _modules_of(attention_of(net), trained.metadata.modules, "gates")


def fitted_scores(net: PreTrainedModel, scores: Scores) -> list[Attention]:
    """Return the modules of scores.

    Raises:
        PlanError: If they do not fit the model.
    """
    about = scores.metadata
    attentions = _modules_of(attention_of(net), about.modules, "scores")
    if [tuple(a.group_sizes) for a in attentions] != [*about.group_sizes]:
        raise PlanError("The scores are of other numbers of heads: score this model.")
    return attentions


def _modules_of(
    attentions: Sequence[Attention], names: Sequence[str], evidence: str
) -> list[Attention]:
    present = {attention.path: attention for attention in attentions}
    for name in names:
        if name not in present:
            raise PlanError(
                f"The {evidence} are of '{name}', an attention module that this model does not "
                f"have.{did_you_mean(name, list(present))} Give the model they were made on."
            )
    return [present[name] for name in names]


def refuse_target(target: float | int | None) -> None:
    """Refuse a fraction or count of heads that no model can keep.

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
    """Return the number of query heads to keep.

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
        held = " or ".join(map(str, sorted(set(sizes))))
        raise PlanError(
            f"A count of {target} cannot be kept exactly: the units hold {held} query "
            f"heads each. The nearest counts are {below} and {above}; --unit head removes single "
            "heads."
        )
    return target
