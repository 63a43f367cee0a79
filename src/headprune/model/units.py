"""Units of removal and head budgets, and gates and scores matched to a model's modules."""

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
    """Read the gates of a model, and the modules that they gate.

    Raises:
        CheckpointError: If the folder holds no finished gates.
        PlanError: If they do not fit the model.
    """
    trained = read_gates(folder, source)
    metadata = trained.metadata
    count = [trained.kept.numel()]
    attentions = _modules_of(attention_of(net), metadata.modules, metadata.unit, count, "gates")
    for attention, *recorded in zip(attentions, metadata.heads, metadata.group_sizes, strict=True):
        if recorded != [attention.query_ids, attention.group_sizes]:
            raise PlanError(
                f"The gates are of other heads of '{attention.path}' than the model has. Give the "
                "model they were trained on."
            )
    parameters = dict(net.named_parameters())
    for name, value in (trained.weights or {}).items():
        shape = list(parameters[name].shape) if name in parameters else "none"
        if shape != list(value.shape):
            raise PlanError(
                f"The gates come with a trained weight '{name}' of shape {list(value.shape)}; the "
                f"model has {shape} of that name. Give the model they were trained on."
            )
    return trained, attentions


def fitted_scores(net: PreTrainedModel, scores: Scores) -> list[Attention]:
    """Return the modules that scores are of.

    Raises:
        PlanError: If they do not fit the model.
    """
    metadata = scores.metadata
    attentions = _modules_of(
        attention_of(net), metadata.modules, metadata.unit, metadata.units, "scores"
    )
    heads = sum(attention.query_heads for attention in attentions)
    if metadata.query_heads != heads:
        raise PlanError(
            f"The scores are of {metadata.query_heads} query heads, and the model has {heads} in "
            "these modules: their file is damaged. Get it again."
        )
    return attentions


def _modules_of(
    attentions: Sequence[Attention], names: Sequence[str], unit: Unit, units: Sequence[int], of: str
) -> list[Attention]:
    """Return the modules of some names; ``units`` is their number by module, or in all."""
    present = {attention.path: attention for attention in attentions}
    for name in names:
        if name not in present:
            raise PlanError(
                f"The {of} are of '{name}', an attention module that this model does not have."
                f"{did_you_mean(name, list(present))} Give the model they were made on."
            )
    chosen = [attention for attention in attentions if attention.path in set(names)]
    if [attention.path for attention in chosen] != list(names):
        raise PlanError(
            f"The {of} name the modules in another order than the model has them: their file is "
            "damaged. Get it again."
        )
    counts = [len(members(unit, attention.group_sizes)) for attention in chosen]
    if list(units) not in (counts, [sum(counts)]):
        raise PlanError(
            f"The {of} are damaged: there are {sum(units)} for units of '{unit.value}', of which "
            f"the model has {sum(counts)} in these modules. Get their folder again."
        )
    return chosen


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
        target: A fraction (float), rounded to the nearest count that whole units reach, or a count
            (int), which they must reach exactly.
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
            f"A count of {target} cannot be kept exactly: the units hold {held} query heads each. "
            f"The nearest counts are {below} and {above}; --unit head removes single heads."
        )
    return target
