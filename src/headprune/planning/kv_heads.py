"""KV heads within a budget: every module keeps some whole, merges them, or loses its attention.

    minimise    the sum over modules of the expected cost of the chosen way
    so that     every module goes one way, and the KV heads come to exactly the budget

One scale for all ways: the squared error left in the output of the attention once W_O is refitted.
Every coordinate is weighted with the curvature of the loss (see the criterion ``compensated``).
Removals follow from one Gram; merges are run on the calibration text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from headprune.config import ConvertConfig
from headprune.context import Context
from headprune.data.text import Sequences
from headprune.errors import DataError, PlanError
from headprune.evidence.statistics import collect
from headprune.model.batch import Batch
from headprune.model.heads import HeadWeights
from headprune.planning.constraints import Constraints
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.records import KvWay
from headprune.surgery.conversion import convert_in_sequence
from headprune.surgery.merges import MergeActivations, MergeContext
from headprune.surgery.merges.budget import exactly
from headprune.surgery.merges.merger import Merger
from headprune.surgery.merges.outputs import (
    OutputMoments,
    output_errors,
    with_fitted_outputs,
)
from headprune.tensors.least_squares import removal_costs
from headprune.tensors.units import Unit, members


@dataclass(frozen=True)
class Way:
    """One way for a module to have fewer KV heads.

    Attributes:
        kept: Positions of the KV heads whose queries stay.
        groups: Positions of the KV heads that become one, for every KV head of the result.
        cost: Its expected cost.
    """

    kept: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    cost: float

    @property
    def kv_heads(self) -> int:
        """KV heads of the result."""
        return len(self.groups)

    @property
    def merges(self) -> bool:
        """True if several KV heads become one."""
        return len(self.groups) < len(self.kept)

    @property
    def said(self) -> str:
        """In a few words."""
        if self.merges:
            return f"{len(self.kept)} merged to {self.kv_heads}"
        return f"{len(self.kept)} kept" if self.kept else "no attention"


@dataclass(frozen=True)
class KvPlan:
    """The choice for every module, and its alternatives.

    Attributes:
        ways: Per module path, the measured ways.
        chosen: Per module path, the way it goes.
    """

    ways: Mapping[str, Sequence[Way]]
    chosen: Mapping[str, Way]

    @property
    def cost(self) -> float:
        """The expected cost of the choice."""
        return sum(way.cost for way in self.chosen.values())

    def records(self) -> dict[str, KvWay]:
        """Return the record: per module path, the choice, and the costs of the others."""
        return {
            path: KvWay(
                way=self.chosen[path].said,
                cost=self.chosen[path].cost,
                others={way.said: way.cost for way in ways if way is not self.chosen[path]},
            )
            for path, ways in self.ways.items()
        }


@dataclass(frozen=True)
class Texts:
    """The text of a plan.

    Attributes:
        plain: All sequences at once, for merges and removals.
        scored: Sequences with a loss; None where the text has none. Then all coordinates of an
            output count alike, as shares of the module's output.
        curvature: Curvature of the loss by module path, where it is known.
    """

    plain: Batch
    scored: Sequences | None
    curvature: Mapping[str, Tensor] = field(default_factory=dict)


def plan_kv_heads(
    model: PreTrainedModel,
    attentions: Sequence[Attention],
    texts: Texts,
    merger: Merger,
    config: ConvertConfig,
    constraints: Constraints,
    context: Context,
) -> KvPlan:
    """Measure every way of every module and choose; the model stays as it is.

    Args:
        model: The model.
        attentions: The modules that may have fewer KV heads.
        texts: The text.
        merger: Merges KV heads.
        config: The budget.
        constraints: Shapes of the result.
        context: Progress.

    Raises:
        PlanError: If no choice comes to the budget, or a module does not run, or its attention
            cannot be recorded.
        DataError: If a cost is not finite.
    """
    budget = round((config.kv_budget or 1.0) * sum(a.kv_heads for a in attentions))
    if budget < 1:
        total = sum(a.kv_heads for a in attentions)
        raise PlanError(
            f"--kv-budget {config.kv_budget} keeps none of {total} KV heads; the least is one, "
            f"{1 / total:.3f}."
        )
    curvature = texts.curvature
    if texts.scored is not None:
        context.stage("measuring the curvature of the loss")
        curvature = _curvature(model, attentions, texts.scored, config.seed, context)
    context.stage("measuring what every layer may keep, merge or lose")
    found: dict[str, list[Way]] = {}

    def measured(attention: Attention, heads: HeadWeights, setting: MergeContext) -> HeadWeights:
        measure = _Measure(attention, heads, setting, curvature.get(attention.path))
        found[attention.path] = [*measure.removals(), *measure.merges(merger)]
        context.step(len(found), len(attentions))
        return heads

    convert_in_sequence(model, attentions, texts.plain, measured)
    idle = next((a for a in attentions if a.path not in found), None)
    if idle is not None:
        kinds = dict.fromkeys(a.kind for a in attentions if a.path in found)
        raise PlanError(
            f"--kv-budget: '{idle.path}' does not run on the calibration text, so that it cannot "
            f"be weighed. Leave it out with {' '.join(f'attention {kind}' for kind in kinds)}."
        )
    ways = {a.path: found[a.path] for a in attentions}
    return choose(ways, budget, f"--kv-budget {config.kv_budget}", constraints)


def choose(
    ways: Mapping[str, Sequence[Way]],
    budget: int,
    asked: str,
    constraints: Constraints | None = None,
) -> KvPlan:
    """Return the ways with the least sum of costs that come to exactly ``budget`` KV heads.

    Args:
        ways: Per module path, those to choose from.
        budget: KV heads of all modules together.
        asked: The option and its value, for messages.
        constraints: Shapes of the result; with the same KV heads everywhere, they
            come as near to the budget as they can without going beyond it.

    Raises:
        PlanError: If no choice comes to the budget; it says which come nearest.
    """
    allowed: Sequence[Sequence[Way]] = [*ways.values()]
    if constraints is not None:
        allowed = [
            [way for way in ways if constraints.allows(layer, len(way.kept), len(ways[0].kept))]
            for layer, ways in enumerate(allowed)
        ]
        if constraints.even_kv_heads:
            allowed, budget = _even(allowed, budget)
    cheapest = [_cheapest(of_module) for of_module in allowed]
    try:
        counts = exactly([{n: w.cost for n, w in each.items()} for each in cheapest], budget)
    except ValueError as error:
        raise PlanError(f"{asked} asks for {error}.") from None
    chosen = (each[count] for each, count in zip(cheapest, counts, strict=True))
    return KvPlan(ways, dict(zip(ways, chosen, strict=True)))


def _even(ways: Sequence[Sequence[Way]], budget: int) -> tuple[list[list[Way]], int]:
    """The ways that keep all queries and end with one number of KV heads, and what that comes to.

    Raises:
        PlanError: If the modules have no number in common.
    """
    whole = [[w for w in of_module if len(w.kept) == len(of_module[0].kept)] for of_module in ways]
    common = set.intersection(*({w.kv_heads for w in of_module} for of_module in whole))
    if not common:
        raise PlanError("The layers have no number of KV heads in common that they could all have.")
    count = max((n for n in common if n * len(ways) <= budget), default=min(common))
    return [[w for w in each if w.kv_heads == count] for each in whole], count * len(ways)


def _cheapest(ways: Sequence[Way]) -> dict[int, Way]:
    """Per number of KV heads, the cheapest way to it; of equals, the first."""
    found: dict[int, Way] = {}
    for way in ways:
        if way.kv_heads not in found or way.cost < found[way.kv_heads].cost:
            found[way.kv_heads] = way
    return found


class _Measure:
    """The costs of the ways of one module."""

    def __init__(
        self,
        attention: Attention,
        heads: HeadWeights,
        setting: MergeContext,
        curvature: Tensor | None,
    ) -> None:
        assert setting.activations is not None
        self.attention, self.heads, self.setting = attention, heads, setting
        self.activations: MergeActivations = setting.activations
        if curvature is None:
            power = self.activations.outputs.double().square().flatten(0, 1).mean(0)
            curvature = torch.ones_like(power) / power.sum().clamp(min=1e-30)
        self.curvature = curvature

    def removals(self) -> list[Way]:
        """Keep every number of KV heads: the least replaceable ones."""
        moments = OutputMoments.of(self.activations.read(self.heads), self.activations.outputs)
        total = len(self.heads.k)
        ways = [Way(tuple(range(total)), tuple((head,) for head in range(total)), 0.0)]
        # a refit moves the mean of the inputs into a bias
        whole = moments.whole if self.heads.o_bias is None else moments.whole.centred()
        by_worth = self._by_worth(whole.inputs)
        for left in range(total - 1, -1, -1):
            kept = tuple(sorted(by_worth[:left]))
            if self._even(kept):
                _, errors = with_fitted_outputs(self.heads, moments, kept)
                ways.append(Way(kept, tuple((head,) for head in kept), self._cost(errors)))
        return ways

    def merges(self, merger: Merger) -> list[Way]:
        """All KV heads merged to every number that leaves equal groups."""
        total = len(self.heads.k)
        ways: list[Way] = []
        if not self._even(range(total)):
            return ways
        for count in range(total - 1, 0, -1):
            if total % count == 0:
                groups = merger.groups(self.heads, self.setting, count)
                merged = merger.merged(self.heads, self.setting, groups)
                cost = self._cost(output_errors(merged, self.activations))
                ways.append(Way(tuple(range(total)), tuple(map(tuple, groups)), cost))
        return ways

    def _by_worth(self, gram: Tensor) -> list[int]:
        """Sort KV heads, first those whose queries the others replace worst."""
        weight = self.heads.o.transpose(0, 1).flatten(1).double()
        width = self.heads.o.shape[2]
        blocks = [
            [query * width + d for query in queries for d in range(width)]
            for queries in members(Unit.KV_GROUP, self.attention.group_sizes)
        ]
        curvature = self.curvature.sqrt()[:, None].to(weight)
        costs = removal_costs(gram, curvature * weight, blocks)
        return sorted(range(len(costs)), key=costs.__getitem__, reverse=True)

    def _even(self, kept: Sequence[int]) -> bool:
        """Return whether the KV heads that stay have equally many queries."""
        return len({self.attention.group_sizes[head] for head in kept}) <= 1

    def _cost(self, errors: Tensor) -> float:
        cost = float(self.curvature.to(errors) @ errors)
        if not cost < float("inf"):
            raise DataError(
                f"What '{self.attention.path}' gives with fewer KV heads is not finite. Try "
                "--config dtype=float32."
            )
        return cost


def _curvature(
    model: PreTrainedModel,
    attentions: Sequence[Attention],
    examples: Sequences,
    seed: int,
    context: Context,
) -> dict[str, Float[Tensor, " out"]]:
    """Per module path, how the loss is curved in every coordinate of the attention's output."""
    evidence = collect(
        model,
        attentions,
        context.each(examples.batches()),
        frozenset({"curvature"}),
        seed=seed,
    )
    return {part.path: part.curvature for part in evidence}
