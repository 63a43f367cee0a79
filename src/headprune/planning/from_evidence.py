"""The plan by gates, scores or a plan file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headprune.config import DataConfig, LayoutOption, Method, PlanConfig, Target
from headprune.errors import PlanError
from headprune.io.folders import digest_of
from headprune.model.attention import attention_of
from headprune.model.units import (
    fitted_gates,
    head_budget,
    refuse_target,
    unit_sizes,
)
from headprune.planning.choice import HeadChoice
from headprune.planning.constraints import Constraints, constraints_of
from headprune.planning.from_scores import plan_from_scores
from headprune.planning.padding import laid_out
from headprune.planning.plan import planned_by
from headprune.schemas.gates import GatesMetadata, read_metadata
from headprune.schemas.plan import ModelIdentity, Plan, plan_content, read_plan
from headprune.schemas.records import Evidence
from headprune.schemas.scores import read_scores
from headprune.surgery.cut import Cut


@dataclass(frozen=True)
class CutRequest:
    """A requested cut, by one of gates, scores and a plan.

    Attributes:
        gates: Folder that train-gates wrote.
        plan: A plan, or the path of a plan file.
        scores: Folder that score wrote; needs ``keep``.
        criterion: With ``scores``: the criterion; None for the only one.
        keep: A fraction (float) or count (int) of heads; None for that of ``gates``.
        layout: Shapes of the result.
        targets: Its engines.
        evidence: The evidence of a plan that is not from a file.
    """

    gates: Path | None = None
    plan: Path | Plan | None = None
    scores: Path | None = None
    criterion: str | None = None
    keep: float | int | None = None
    layout: LayoutOption = LayoutOption.PER_LAYER
    targets: Sequence[Target] = ()
    evidence: Evidence | None = None


@dataclass(frozen=True)
class ChosenCuts:
    """A cut by its evidence.

    Attributes:
        plan: The heads that stay.
        unpadded: The same without zero heads.
        cuts: The heads that go.
        evidence: The evidence of the plan.
        weights: The trained weights that belong to it, by name.
        padding: The padding, a sentence each.
    """

    plan: Plan
    unpadded: Plan
    cuts: list[Cut]
    evidence: Evidence
    weights: dict[str, Tensor]
    padding: tuple[str, ...]


def refuse_several(request: CutRequest) -> None:
    """Refuse a request without evidence, and one with several kinds.

    Raises:
        PlanError: Naming the kinds.
    """
    if sum(each is not None for each in (request.gates, request.plan, request.scores)) != 1:
        raise PlanError(
            "Give one of --gates (from train-gates), --scores (from score) and --plan (a file)."
        )


def refuse_request(request: CutRequest, refit: DataConfig | None = None) -> None:
    """Refuse a request that fits no model, before one is loaded.

    Raises:
        HeadpruneError: If its parts do not fit together.
    """
    gates, plan, scores, keep = request.gates, request.plan, request.scores, request.keep
    refuse_several(request)
    if scores is not None:
        stored = read_scores(scores)
        if keep is None:
            raise PlanError("--scores needs --keep, the share or count of heads that stay.")
        stored.of(request.criterion)
    refuse_target(keep)
    if isinstance(plan, Path):
        plan_content(plan)
    trained = read_metadata(gates) if gates is not None else None
    if trained is not None and trained.method is Method.REFIT:
        _refuse_other_than_refitted(trained, keep, refit)
    if refit is not None and trained is not None and trained.trained_weights:
        raise PlanError(
            "--refit fits W_O to the original, but these gates come with trained "
            "weights, which compute something else. Leave out --refit, or train with --train gates."
        )


def _refuse_other_than_refitted(
    trained: GatesMetadata, keep: float | int | None, refit: DataConfig | None
) -> None:
    """Refuse a refit or other heads with gates that hold a refitted W_O."""
    if refit is not None:
        raise PlanError(
            "--refit: W_O was refitted when these gates were made, and is in them. Leave out "
            "--refit, or train gates with --method l0."
        )
    sizes = trained.unit_sizes()
    if keep is not None and head_budget(keep, sizes) != trained.kept_heads:
        raise PlanError(
            f"--keep {keep}: the gates hold a W_O refitted to {trained.kept_heads} of "
            f"{trained.query_heads} heads. Leave out --keep, train gates with that "
            "--target-heads, or train them with --method l0."
        )


def cuts_by(net: PreTrainedModel, source: ModelIdentity, request: CutRequest) -> ChosenCuts:
    """Choose the heads that go.

    Raises:
        HeadpruneError: If there is no such plan, it keeps no head, or its layout does not fit.
    """
    constraints = constraints_of(net, request.layout, request.targets)
    chosen, evidence, weights = _plan(net, source, request, constraints)
    if chosen.query_heads and not chosen.kept_heads:
        raise PlanError(
            f"None of the {chosen.query_heads} query heads would stay, and a model without any "
            "attention serves nobody. Keep at least one; single layers may lose all of theirs."
        )
    plan, cuts, padding = laid_out(chosen, constraints)
    return ChosenCuts(plan, chosen, cuts, evidence, weights, padding)


def _plan(
    net: PreTrainedModel, source: ModelIdentity, request: CutRequest, constraints: Constraints
) -> tuple[Plan, Evidence, dict[str, Tensor]]:
    if request.gates is not None:
        return _from_gates(net, source, request.gates, request.keep, constraints)
    if request.scores is not None:
        return *_from_scores(net, source, request, constraints), {}
    assert request.plan is not None
    plan = request.plan
    if isinstance(plan, Path):
        present = {a.path: (a.query_ids, a.kv_heads) for a in attention_of(net)}
        plan = read_plan(plan, present)
    _refuse_merging(plan)
    content = plan.model_dump(mode="json")
    return plan, request.evidence or Evidence(kind="plan", id=digest_of(content)), {}


def _refuse_merging(plan: Plan) -> None:
    """Refuse a plan that merges KV heads."""
    if plan.merged:
        how = f" (by {plan.merge})" if plan.merge else ""
        counts = [len(part.groups or range(part.kv_heads)) for part in plan.attentions.values()]
        raise PlanError(
            f"The plan merges KV heads{how}, the first in '{plan.merged[0]}', and a cut merges "
            f"none: headprune convert-gqa with --kv-heads {','.join(map(str, counts))} makes such "
            "a model."
        )


def _from_scores(
    net: PreTrainedModel, source: ModelIdentity, request: CutRequest, constraints: Constraints
) -> tuple[Plan, Evidence]:
    assert request.scores is not None
    scores = read_scores(request.scores, source)
    budget = PlanConfig(keep=request.keep, criterion=request.criterion, targets=request.targets)
    planned = planned_by(net, source, scores, budget, constraints, net.dtype)
    return planned.plan, planned.evidence


def _from_gates(
    net: PreTrainedModel,
    source: ModelIdentity,
    folder: Path,
    keep: float | int | None,
    constraints: Constraints,
) -> tuple[Plan, Evidence, dict[str, Tensor]]:
    trained, attentions = fitted_gates(net, source, folder)
    unit = trained.metadata.unit
    whole = [a for a in attention_of(net) if a.path not in trained.metadata.modules]
    sizes = unit_sizes(attentions, unit)
    budget = trained.metadata.kept_heads if keep is None else head_budget(keep, sizes)
    # units that training kept come first; one that --keep brings back is fully open
    alpha = trained.log_alpha.double()
    scores = alpha + (alpha.max() - alpha.min() + 1.0) * trained.kept
    scale = torch.where(trained.kept, trained.value, 1.0).tolist()
    kept = HeadChoice(attentions, unit, [], constraints).of(scores, budget)
    flags = [float(at in kept) for at in range(len(sizes))]
    budget = sum(sizes[at] for at in kept)
    fitted = trained.metadata.method is Method.REFIT
    if fitted and kept != set(trained.kept.nonzero()[:, 0].tolist()):
        raise PlanError(
            "W_O was refitted to the heads that these gates keep, and --layout or "
            "--for keeps others. Leave these out, or train gates with --method l0."
        )
    plan = plan_from_scores(attentions, unit, flags, budget, source, scale, whole)
    seed = trained.metadata.seed
    evidence = Evidence(kind="gates", id=trained.id, keep=keep, seed=seed)
    return plan, evidence, trained.weights or {}
