"""From one score per unit and a budget to a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headprune.errors import PlanError
from headprune.model.units import unit_sizes
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.plan import AttentionPlan, ModelIdentity, Plan
from headprune.tensors.selection import keep_best
from headprune.tensors.units import Unit, members


def even_units(
    attentions: Sequence[Attention],
    unit: Unit,
    scores: Sequence[float],
    budget: int,
    fits: Callable[[int, int], bool] = lambda queries, kv_heads: True,
) -> list[int]:
    """Return the positions of the best units, the same number in every module.

    Args:
        attentions: The attention modules, in order.
        unit: Unit of removal.
        scores: One score per unit, in order.
        budget: Query heads to keep. The nearest equal count is taken, of two the larger.
        fits: Return whether these numbers of query and KV heads are allowed.

    Raises:
        PlanError: If the modules differ in their heads, or no count fits.
    """
    per_module = [members(unit, a.group_sizes) for a in attentions]
    if len({(len(units), len(units[0]) if units else 0) for units in per_module}) != 1:
        raise PlanError(
            "The attention modules differ in their number of heads, so that no cut fits a plain "
            "config. Leave out --layout uniform."
        )
    units, size = len(per_module[0]), len(per_module[0][0])
    groups = members(Unit.KV_GROUP, attentions[0].group_sizes)

    def held(count: int) -> bool:
        kept = {query for heads in per_module[0][:count] for query in heads}
        return fits(len(kept), sum(not kept.isdisjoint(group) for group in groups))

    wanted = budget / (size * len(attentions))
    possible = [count for count in range(1, units + 1) if held(count)]
    if not possible:
        raise PlanError(
            "No plan with the same heads in every layer keeps to the budgets. Loosen them, or "
            "leave out --for."
        )
    count = min(possible, key=lambda count: (abs(count - wanted), -count))
    kept: list[int] = []
    for start in range(0, units * len(attentions), units):
        best = sorted(range(start, start + units), key=lambda u: (-scores[u], u))
        kept += sorted(best[:count])
    return kept


def plan_from_scores(
    attentions: Sequence[Attention],
    unit: Unit,
    scores: Sequence[float],
    budget: int,
    model: ModelIdentity | None = None,
    whole: Sequence[Attention] = (),
) -> Plan:
    """Return the plan that keeps the best units, exactly ``budget`` query heads.

    Args:
        attentions: The attention modules to choose among, in order.
        unit: Unit of removal.
        scores: One score per unit, in order; higher is kept first.
        budget: Query heads to keep.
        model: The model that the plan is for.
        whole: Other attention modules of the model, which keep all their heads.
    """
    kept = set(keep_best(scores, unit_sizes(attentions, unit), budget))
    parts, index = {}, 0
    for attention in attentions:
        chosen: list[int] = []
        for unit_heads in members(unit, attention.group_sizes):
            if index in kept:
                chosen += [attention.query_ids[position] for position in unit_heads]
            index += 1
        parts[attention.path] = AttentionPlan(
            query_heads=attention.query_heads,
            kv_heads=attention.kv_heads,
            keep=tuple(sorted(chosen)),
        )
    for attention in whole:
        parts[attention.path] = AttentionPlan(
            query_heads=attention.query_heads,
            kv_heads=attention.kv_heads,
            keep=tuple(sorted(attention.query_ids)),
        )
    return Plan(unit=unit, model=model, attentions=parts)
