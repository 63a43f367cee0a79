"""headprune prune --dry-run: the cut, and the price of an even one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headprune.config import Dtype, LayoutOption
from headprune.context import Context
from headprune.errors import PlanError
from headprune.evidence.score import refit_warnings
from headprune.io.outputs import claims_output
from headprune.io.ownership import PLAN
from headprune.model.open import Model, open_model
from headprune.model.units import fitted_gates, fitted_scores, unit_sizes
from headprune.planning.choose import ChosenCuts, CutRequest, choose, refuse_request
from headprune.result.write import counts, layout_of
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.plan import Plan, Shape
from headprune.schemas.records import Heads
from headprune.schemas.scores import ScoresMetadata, read_scores
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
        layout: Per attention module, the heads after it.
        shapes: With gates or scores: the evidence that the plan keeps, and that an even cut
            would keep.
        spent: Per budget: the limit, and the plan's sum.
        scored: Metadata of the scores, if it is by scores.
        roles_lost: Roles that lose their last head; None without a record of roles.
        warnings: Purpose and cost of zero heads, and of a written plan what its scores assume.
    """

    plan: Plan
    shape: Shape
    parameters: tuple[int, int]
    kv_heads: tuple[int, int]
    layout: Mapping[str, Heads]
    shapes: tuple[ShapeCost, ...] = ()
    spent: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    scored: ScoresMetadata | None = None
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
            "budgets": {n: {"at_most": m, "plan": t} for n, (m, t) in self.spent.items()},
            "roles_lost": self.roles_lost,
            "warnings": list(self.warnings),
            "plan": self.plan.model_dump(mode="json"),
        }


@claims_output("model", "request.gates", "request.plan", "request.scores", kind=PLAN)
def preview(
    model: str | Path,
    request: CutRequest,
    dtype: Dtype = Dtype.AUTO,
    output: Path | None = None,
    overwrite: bool = False,
    context: Context = Context(),
) -> Preview:
    """Return what ``prune`` would do with the same arguments.

    Args:
        model: Folder or hub id.
        request: The heads to remove.
        dtype: Element type to compute in.
        output: The plan file to write; None for none.
        overwrite: Replace an existing file.
        context: Progress and permissions.

    Raises:
        HeadpruneError: If the request does not fit the model.
    """
    refuse_request(request)
    context.stage("reading the headers")
    opened = open_model(model, dtype, context.allowed)
    chosen = choose(opened, request)
    shapes = _shapes(opened, request, chosen) if request.plan is None else ()
    net, cuts = opened.skeleton, chosen.cuts
    stored = result_shape(cuts, net.config)
    before = counts(net, cuts)
    cut_heads(net, cuts)
    parameters, kv_heads, _ = zip(before, counts(net, cuts), strict=True)
    if output is not None:
        chosen.unpadded.write(output)
    return Preview(
        plan=chosen.plan,
        shape=stored,
        parameters=parameters,
        kv_heads=kv_heads,
        layout=layout_of(cuts),
        shapes=shapes,
        spent=chosen.spent,
        scored=chosen.scored,
        roles_lost=chosen.roles_lost,
        warnings=(*chosen.padding, *_notes(chosen, output)),
    )


def _notes(chosen: ChosenCuts, output: Path | None) -> tuple[str, ...]:
    """Return the warnings of a written plan: a later cut by it does not know its scores."""
    criterion = chosen.evidence.criterion
    return () if output is None or criterion is None else refit_warnings(criterion)


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


def _units(model: Model, asked: CutRequest) -> _Units:
    """Of gates the expected open heads, of scores the scores."""
    net, source = model.any_net, model.identity
    if asked.gates is not None:
        trained, attentions = fitted_gates(net, source, asked.gates)
        unit = trained.metadata.unit
        sizes = torch.tensor(unit_sizes(attentions, unit))
        return _Units(attentions, unit, trained.open_probability() * sizes)
    assert isinstance(asked.scores, Path)
    found = read_scores(asked.scores, source)
    values = found.of(asked.criterion)[1]
    return _Units(fitted_scores(net, found), found.metadata.unit, values)


def _shapes(model: Model, asked: CutRequest, chosen: ChosenCuts) -> tuple[ShapeCost, ...]:
    """Return the evidence that a choice keeps, and that an even one would keep."""
    units, config = _units(model, asked), model.any_net.config

    def cost(shape: str, cuts: ChosenCuts) -> ShapeCost:
        plan, stored = cuts.unpadded, result_shape(cuts.cuts, config).value
        return ShapeCost(shape, plan.kept_heads, units.share(plan), stored, None)

    engines = ", ".join(target.value for target in asked.targets)
    found = cost(engines or asked.layout.value, chosen)
    even = LayoutOption.UNIFORM
    if asked.layout is even and not asked.targets:
        return (found,)
    try:
        cuts = choose(model, asked.model_copy(update={"layout": even, "targets": ()}))
        return found, cost(even.value, cuts)
    except PlanError as error:
        return found, ShapeCost(even.value, None, None, None, str(error).split(". ")[0] + ".")
