"""headprune prune --dry-run: the cut, and the price of an even one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headprune.config import Dtype, LayoutOption
from headprune.context import Allowed
from headprune.errors import PlanError
from headprune.model.cost import kv_heads_of
from headprune.model.open import open_model
from headprune.model.units import fitted_gates, fitted_scores, unit_sizes
from headprune.planning.from_evidence import ChosenCuts, CutRequest, cuts_by, refuse_request
from headprune.planning.roles import roles_lost
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.plan import ModelIdentity, Plan, Shape
from headprune.schemas.roles import read_roles
from headprune.schemas.scores import read_scores
from headprune.surgery.cut import cut_heads, result_shape
from headprune.tensors.units import Unit, members


@dataclass(frozen=True)
class ShapeCost:
    """The cost of a shape.

    Attributes:
        shape: The values of ``--for``, or of ``--layout``.
        heads: Query heads that it keeps, zero heads not among them; None where it is not possible.
        evidence: Share that it keeps of the expected open heads, by gates, or of the scores; None
            where scores are not such that shares of them say anything.
        stored: How it would be stored.
        why_not: Why it is not possible.
    """

    shape: str
    heads: int | None
    evidence: float | None
    stored: str | None
    why_not: str | None


@dataclass(frozen=True)
class Preview:
    """A cut, before it is written.

    Attributes:
        plan: The plan.
        shape: How the result would be stored.
        parameters: Parameters before and after.
        kv_heads: KV heads before and after.
        shapes: With gates or scores: the evidence that the plan keeps, and that an even cut
            would keep.
        roles_lost: Roles that lose their last head; None without a record of roles.
        warnings: Purpose and cost of zero heads, a sentence each.
    """

    plan: Plan
    shape: Shape
    parameters: tuple[int, int]
    kv_heads: tuple[int, int]
    shapes: tuple[ShapeCost, ...] = ()
    roles_lost: tuple[str, ...] | None = None
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For ``--dry-run --json``."""
        return {
            "shape": self.shape.value,
            "query_heads": [self.plan.query_heads, self.plan.kept_heads],
            "kv_heads": list(self.kv_heads),
            "parameters": list(self.parameters),
            "shapes": [asdict(cost) for cost in self.shapes],
            "roles_lost": self.roles_lost,
            "warnings": list(self.warnings),
            "plan": self.plan.model_dump(mode="json"),
        }


def preview(
    model: str | Path,
    asked: CutRequest,
    dtype: Dtype = Dtype.AUTO,
    roles: Path | None = None,
    allowed: Allowed = Allowed(),
) -> Preview:
    """Says what ``prune`` would do with the same arguments, and writes nothing."""
    refuse_request(asked)
    opened = open_model(model, dtype, allowed)
    net, source = opened.skeleton, opened.identity
    record = None if roles is None else read_roles(roles, source)
    chosen = cuts_by(net, source, asked)
    cuts = chosen.cuts
    stored = result_shape(cuts, net.config)
    before = (net.num_parameters(), sum(kv_heads_of(net, cut.attention) for cut in cuts))
    shapes = _shapes(net, source, asked, chosen) if asked.plan is None else ()
    cut_heads(net, cuts)
    after = (net.num_parameters(), sum(kv_heads_of(net, cut.attention) for cut in cuts))
    sizes = (before[0], after[0]), (before[1], after[1])
    lost = roles_lost(record, chosen.unpadded)
    return Preview(chosen.plan, stored, *sizes, shapes, lost, chosen.padding)


@dataclass(frozen=True)
class _Units:
    """Name the evidence of the choice."""

    attentions: Sequence[Attention]
    unit: Unit
    evidence: Tensor

    def share(self, plan: Plan) -> float | None:
        """The share of all evidence that a plan keeps; None where shares say nothing."""
        kept = [
            attention.query_ids[unit[0]] in plan.attentions[attention.path].keep
            for attention in self.attentions
            for unit in members(self.unit, attention.group_sizes)
        ]
        total = float(self.evidence.sum())
        if total <= 0 or float(self.evidence.min()) < 0:
            return None
        return float(self.evidence[torch.tensor(kept)].sum()) / total


def _units(net: PreTrainedModel, source: ModelIdentity, asked: CutRequest) -> _Units:
    """Of gates the expected open heads, of scores the scores."""
    if asked.gates is not None:
        trained, attentions = fitted_gates(net, source, asked.gates)
        unit = trained.metadata.unit
        sizes = torch.tensor(unit_sizes(attentions, unit))
        return _Units(attentions, unit, trained.open_probability() * sizes)
    assert asked.scores is not None
    found = read_scores(asked.scores, source)
    values = found.of(asked.criterion)[1]
    return _Units(fitted_scores(net, found), found.metadata.unit, values)


def _shapes(
    net: PreTrainedModel, source: ModelIdentity, asked: CutRequest, chosen: ChosenCuts
) -> tuple[ShapeCost, ...]:
    """Return the evidence that a choice keeps, and that an even one would keep."""
    units = _units(net, source, asked)

    def cost(shape: str, cuts: ChosenCuts) -> ShapeCost:
        plan, stored = cuts.unpadded, result_shape(cuts.cuts, net.config).value
        return ShapeCost(shape, plan.kept_heads, units.share(plan), stored, None)

    engines = ", ".join(target.value for target in asked.targets)
    found = cost(engines or asked.layout.value, chosen)
    even = LayoutOption.UNIFORM
    if asked.layout is even and not asked.targets:
        return (found,)
    try:
        cuts = cuts_by(net, source, replace(asked, layout=even, targets=()))
        return found, cost(even.value, cuts)
    except PlanError as error:
        return found, ShapeCost(even.value, None, None, None, str(error).split(". ")[0] + ".")
