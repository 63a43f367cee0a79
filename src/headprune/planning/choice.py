"""The choice of units by their scores: within budgets, in shapes that engines hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from headprune.model.units import unit_sizes
from headprune.planning.allocation import BudgetLimit, allocate
from headprune.planning.constraints import Constraints
from headprune.planning.from_scores import even_units
from headprune.runtime.modeling_headprune import Attention
from headprune.surgery.cut import config_holds
from headprune.tensors.units import Unit


def with_held(values: Tensor, held: frozenset[int]) -> list[float]:
    """Return the scores, infinite for held units."""
    return [math.inf if at in held else score for at, score in enumerate(values.tolist())]


@dataclass(frozen=True)
class HeadChoice:
    """A choice of units, within budgets and the shapes of engines.

    Attributes:
        attentions: The modules, in order.
        unit: Unit of removal.
        limits: Budgets as sums over the kept heads.
        constraints: Shapes of the plan.
        held: Units that are not to go.
    """

    attentions: Sequence[Attention]
    unit: Unit
    limits: Sequence[BudgetLimit]
    constraints: Constraints
    held: frozenset[int] = frozenset()

    def of(self, values: Tensor, heads: int | None) -> set[int]:
        """Return the units to keep."""
        attentions, unit = self.attentions, self.unit
        scores = with_held(values, self.held)
        if self.constraints.even:
            wanted = heads if heads is not None else sum(unit_sizes(attentions, unit))
            return set(even_units(attentions, unit, scores, wanted, self._fits))
        layers = range(len(attentions))
        filled = [layer for layer in layers if self.constraints.keeps_a_head(layer)]
        return set(allocate(attentions, unit, scores, heads, self.limits, filled))

    def _fits(self, queries: int, kv_heads: int) -> bool:
        """Return whether every module may keep these counts."""
        present = [(queries, kv_heads)] * len(self.attentions)
        return config_holds(self.constraints.net.config, queries, kv_heads) and all(
            limit.prices.total(present) <= limit.most for limit in self.limits
        )
