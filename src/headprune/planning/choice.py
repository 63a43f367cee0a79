"""The choice of units by their scores: within budgets, in shapes that engines hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from headprune.config import BudgetConfig
from headprune.errors import PlanError
from headprune.model.units import unit_sizes
from headprune.planning.allocation import BudgetLimit, PerModule, allocate
from headprune.planning.constraints import Constraints
from headprune.planning.from_scores import even_units
from headprune.runtime.modeling_headprune import Attention
from headprune.surgery.cut import config_holds
from headprune.tensors.units import Unit


def share_of(values: Tensor, kept: set[int], free: set[int]) -> float | None:
    """Return the scores of ``kept`` as a fraction of those of ``free``."""
    total = float(values[sorted(free)].sum())
    return float(values[sorted(kept)].sum()) / total if total > 0 <= float(values.min()) else None


def with_held(values: Tensor, held: frozenset[int]) -> list[float]:
    """Return the scores, infinite for held units."""
    return [math.inf if at in held else score for at, score in enumerate(values.tolist())]


@dataclass(frozen=True)
class HeadChoice:
    """A choice of units, within budgets and the shapes of engines.

    Attributes:
        attentions: The modules, in order.
        unit: Unit of removal.
        budget: The budget.
        limits: The same as sums over the kept heads.
        constraints: Shapes of the plan.
        held: Units that are not to go.
    """

    attentions: Sequence[Attention]
    unit: Unit
    budget: BudgetConfig
    limits: Sequence[BudgetLimit]
    constraints: Constraints
    held: frozenset[int] = frozenset()

    def of(self, values: Tensor, heads: int | None) -> set[int]:
        """Return the units to keep."""
        attentions, unit, least = self.attentions, self.unit, self.budget.min_per_layer
        scores = with_held(values, self.held)
        if self.constraints.even:
            wanted = heads if heads is not None else sum(unit_sizes(attentions, unit))
            return set(even_units(attentions, unit, scores, wanted, self._fits))
        layers = range(len(attentions))
        at_least = [max(least, int(self.constraints.keeps_a_head(layer))) for layer in layers]
        of_module = None
        if self.budget.per_layer:
            assert heads is not None
            of_module = equal_shares(attentions, unit, heads, least)
            heads = None
        per_module = PerModule(of_module, at_least)
        return set(allocate(attentions, unit, scores, heads, per_module, self.limits))

    def _fits(self, queries: int, kv_heads: int) -> bool:
        """Return whether every module may keep these counts."""
        present = [(queries, kv_heads)] * len(self.attentions)
        return (
            config_holds(self.constraints.net.config, queries, kv_heads)
            and queries >= self.budget.min_per_layer
            and all(limit.prices.total(present) <= limit.most for limit in self.limits)
        )


def equal_shares(
    attentions: Sequence[Attention], unit: Unit, heads: int, at_least: int
) -> list[int]:
    """Return the heads of each module: equal fractions in whole units, ``heads`` in all.

    Raises:
        PlanError: If a module keeps fewer than ``at_least``, or whole units do not fit.
    """
    total = max(sum(a.query_heads for a in attentions), 1)
    sizes = [sorted(set(unit_sizes([a], unit))) for a in attentions]
    counts = []
    steps = [each[0] if len(each) == 1 else 1 for each in sizes]
    for attention, step in zip(attentions, steps, strict=True):
        counts.append(int(heads * attention.query_heads / total) // step * step)
    # the rest goes to the modules that lost most by rounding
    short = [(counts[m] - heads * a.query_heads / total, m) for m, a in enumerate(attentions)]
    for _, m in sorted(short):
        step = steps[m]
        if sum(counts) + step <= heads and counts[m] + step <= attentions[m].query_heads:
            counts[m] += step
    if sum(counts) != heads:
        raise PlanError(
            f"per_layer: {heads} heads cannot be shared out evenly in whole units; "
            f"{sum(counts)} can."
        )
    for attention, count in zip(attentions, counts, strict=True):
        if attention.query_heads and count < at_least:
            raise PlanError(
                f"per_layer leaves {count} heads in '{attention.path}', fewer than "
                f"min_per_layer {at_least}. Keep more heads, or lower it."
            )
    return counts
