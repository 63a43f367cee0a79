"""From one score per unit and budgets to a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from headprune.errors import PlanError
from headprune.model.units import unit_sizes
from headprune.planning.allocation import BudgetLimit, allocate
from headprune.planning.constraints import Constraints
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.plan import AttentionPlan, ModelIdentity, Plan
from headprune.surgery.cut import config_holds
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


def kept_units(
    attentions: Sequence[Attention],
    unit: Unit,
    values: Tensor,
    heads: int | None,
    limits: Sequence[BudgetLimit],
    constraints: Constraints,
    held: Collection[int] = (),
) -> set[int]:
    """Return the units to keep, within budgets and the shapes of engines.

    Args:
        attentions: The modules, in order.
        unit: Unit of removal.
        values: One score per unit, in order; higher is kept first.
        heads: Query heads to keep; None for as many as the budgets allow.
        limits: Budgets as sums over the kept heads.
        constraints: Shapes of the plan.
        held: Units that are not to go.

    Raises:
        PlanError: If there are no such units.
    """
    scores = [math.inf if at in held else score for at, score in enumerate(values.tolist())]
    if not constraints.even:
        filled = [layer for layer in range(len(attentions)) if constraints.keeps_a_head(layer)]
        return set(allocate(attentions, unit, scores, heads, limits, filled))

    def fits(queries: int, kv_heads: int) -> bool:
        present = [(queries, kv_heads)] * len(attentions)
        return config_holds(constraints.net.config, queries, kv_heads) and all(
            limit.prices.total(present) <= limit.most for limit in limits
        )

    wanted = heads if heads is not None else sum(unit_sizes(attentions, unit))
    return set(even_units(attentions, unit, scores, wanted, fits))


def plan_keeping(
    attentions: Sequence[Attention],
    unit: Unit,
    kept: Collection[int],
    model: ModelIdentity | None = None,
    whole: Sequence[Attention] = (),
) -> Plan:
    """Return the plan that keeps some units.

    Args:
        attentions: The attention modules to choose among, in order.
        unit: Unit of removal.
        kept: Positions of the units that stay.
        model: The model that the plan is for.
        whole: Other attention modules of the model, which keep all their heads.
    """
    chosen, first = list[Sequence[int]](), 0
    for attention in attentions:
        units = members(unit, attention.group_sizes)
        stay = [heads for at, heads in enumerate(units, first) if at in kept]
        chosen.append([attention.query_ids[query] for heads in stay for query in heads])
        first += len(units)
    chosen += [attention.query_ids for attention in whole]
    parts = {
        attention.path: AttentionPlan(
            query_heads=attention.query_heads,
            kv_heads=attention.kv_heads,
            keep=tuple(sorted(heads)),
        )
        for attention, heads in zip((*attentions, *whole), chosen, strict=True)
    }
    return Plan(unit=unit, model=model, attentions=parts)
