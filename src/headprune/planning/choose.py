"""The choice of the heads that go: by gates, scores or a plan, within budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import InstanceOf
from torch import Tensor
from transformers import PreTrainedModel

from headprune.config import DataConfig, PlanConfig
from headprune.errors import PlanError
from headprune.io.folders import digest_of
from headprune.model.attention import attention_of
from headprune.model.cost import stated_context
from headprune.model.open import Model
from headprune.model.units import (
    fitted_gates,
    fitted_scores,
    head_budget,
    refuse_target,
    unit_sizes,
)
from headprune.planning.allocation import BudgetLimit
from headprune.planning.budgets import cache_prices, parameter_prices
from headprune.planning.constraints import Constraints, constraints_of
from headprune.planning.from_scores import kept_units, plan_keeping
from headprune.planning.padding import laid_out
from headprune.planning.roles import asked_roles, held_units, refuse_broken_hold, roles_lost
from headprune.render.blocks import at_context
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.gates import GatesMetadata, read_metadata
from headprune.schemas.plan import Plan, plan_content, read_plan
from headprune.schemas.records import Evidence
from headprune.schemas.roles import RolesRecord
from headprune.schemas.scores import Scores, ScoresMetadata, read_scores
from headprune.surgery.cut import Cut
from headprune.tensors.units import Unit, members


class CutRequest(PlanConfig):
    """A requested cut, by one of gates, scores and a plan; the budget is for the first two.

    Attributes:
        gates: Folder that train-gates wrote.
        scores: Scores, or the folder that score wrote; needs a budget.
        plan: A plan, or the path of a plan file.
    """

    gates: Path | None = None
    scores: Path | InstanceOf[Scores] | None = None
    plan: Path | InstanceOf[Plan] | None = None


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
        spent: Per budget: the limit, and the plan's sum.
        scored: Metadata of the scores, if it is by scores.
        roles_lost: Roles that lose their last head; None without a record of roles.
    """

    plan: Plan
    unpadded: Plan
    cuts: list[Cut]
    evidence: Evidence
    weights: dict[str, Tensor]
    padding: tuple[str, ...]
    spent: dict[str, tuple[float, float]]
    scored: ScoresMetadata | None
    roles_lost: tuple[str, ...] | None


@dataclass(frozen=True)
class _Decision:
    """A plan, before it is laid out; fields as of ``ChosenCuts``."""

    plan: Plan
    evidence: Evidence
    weights: dict[str, Tensor] = field(default_factory=dict)
    spent: dict[str, tuple[float, float]] = field(default_factory=dict)
    scored: ScoresMetadata | None = None


def refuse_request(request: CutRequest, refit: DataConfig | None = None) -> None:
    """Refuse a request that fits no model, before one is loaded.

    Raises:
        HeadpruneError: If its parts do not fit together.
    """
    gates, plan, scores, keep = request.gates, request.plan, request.scores, request.keep
    if sum(each is not None for each in (gates, plan, scores)) != 1:
        raise PlanError(
            "Give one of --gates (from train-gates), --scores (from score) and --plan (a file)."
        )
    if request.keep_roles and request.roles is None:
        raise PlanError("--keep-roles has no effect without --roles: give both.")
    asked_roles(request)
    if scores is not None:
        if all(most is None for most in (keep, request.max_params, request.max_kv_bytes)):
            raise PlanError("--scores needs a budget: --keep, --max-params or --max-kv-bytes.")
        _scores(scores).of(request.criterion)
    refuse_target(keep)
    if isinstance(plan, Path):
        plan_content(plan)
    trained = read_metadata(gates) if gates is not None else None
    if trained is not None and trained.window is not None:
        raise PlanError(
            "These gates give heads a window, and a cut removes heads: give them to headprune "
            "convert-swa --gates."
        )
    if trained is not None and trained.refitted:
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
            "--refit: W_O was refitted when these gates were made, and is in them. Leave it out."
        )
    sizes = trained.unit_sizes()
    if keep is not None and head_budget(keep, sizes) != trained.kept_heads:
        raise PlanError(
            f"--keep {keep}: the gates hold a W_O refitted to {trained.kept_heads} of "
            f"{trained.query_heads} heads. Leave out --keep, or train gates with that "
            "--target-heads."
        )


def choose(model: Model, request: CutRequest, empty_layers: bool = True) -> ChosenCuts:
    """Choose the heads that go.

    Without ``empty_layers``, every layer keeps a head.

    Raises:
        HeadpruneError: If there is no such plan, it keeps no head, or its layout does not fit.
    """
    net, record = model.any_net, asked_roles(request, model.identity)
    constraints = constraints_of(net, request.layout, request.targets, empty_layers)
    if request.gates is not None:
        choice = _by_gates(model, request.gates, request.keep, constraints)
    elif request.scores is not None:
        choice = _by_scores(model, request.scores, request, constraints, record)
    else:
        choice = _by_plan(net, request.plan)
    plan = choice.plan
    if plan.query_heads and not plan.kept_heads:
        raise PlanError(
            f"None of the {plan.query_heads} query heads would stay, and a model without any "
            "attention serves nobody. Keep at least one; single layers may lose all of theirs."
        )
    padded, cuts, padding = laid_out(plan, constraints)
    return ChosenCuts(
        plan=padded,
        unpadded=plan,
        cuts=cuts,
        evidence=choice.evidence,
        weights=choice.weights,
        padding=padding,
        spent=choice.spent,
        scored=choice.scored,
        roles_lost=roles_lost(record, plan),
    )


def _scores(given: Path | Scores, *model: Any) -> Scores:
    scores = given if isinstance(given, Scores) else read_scores(given, *model)
    if scores.metadata.window is not None:
        raise PlanError(
            "These scores say what heads lose by a window, and a cut removes heads. Give them to "
            "headprune convert-swa, or score with --form removed."
        )
    return scores


def _by_plan(net: PreTrainedModel, plan: Path | Plan | None) -> _Decision:
    if not isinstance(plan, Plan):
        assert plan is not None  # refuse_request
        present = {a.path: (a.query_ids, a.kv_heads) for a in attention_of(net)}
        plan = read_plan(plan, present)
    _refuse_merging(plan)
    return _Decision(plan, Evidence(kind="plan", id=digest_of(plan.model_dump(mode="json"))))


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


def _by_scores(
    model: Model,
    given: Path | Scores,
    budget: PlanConfig,
    constraints: Constraints,
    record: RolesRecord | None,
) -> _Decision:
    net, scores = model.any_net, _scores(given, model.identity)
    name, values = scores.of(budget.criterion)
    attentions, unit = fitted_scores(net, scores), scores.metadata.unit
    whole = [a for a in model.attentions if a.path not in scores.metadata.modules]
    sizes = unit_sizes(attentions, unit)
    held = held_units(record, budget.keep_roles, attentions, unit)
    limits = _limits(net, attentions, budget, model.result_dtypes(budget.out_dtype).default)
    heads = None if budget.keep is None else head_budget(budget.keep, sizes)
    kept = kept_units(attentions, unit, values, heads, limits, constraints, held)
    refuse_broken_hold(held, kept, sizes, budget.keep_roles)
    plan = plan_keeping(attentions, unit, kept, model.identity, whole)
    spent = {limit.option: (limit.most, _total(limit, attentions, plan)) for limit in limits}
    seed = scores.metadata.calibration.seed
    evidence = Evidence(kind="scores", id=scores.id, criterion=name, keep=budget.keep, seed=seed)
    return _Decision(plan, evidence, spent=spent, scored=scores.metadata)


def _limits(
    net: PreTrainedModel,
    attentions: Sequence[Attention],
    budget: PlanConfig,
    stored: torch.dtype,
) -> list[BudgetLimit]:
    limits = []
    if budget.max_params is not None:
        prices = parameter_prices(net, attentions)
        limits.append(
            BudgetLimit(prices, float(budget.max_params), f"--max-params {budget.max_params:,}")
        )
    if budget.max_kv_bytes is not None:
        context_tokens = budget.context_tokens or stated_context(net)
        prices = cache_prices(net, attentions, stored, context_tokens)
        option = f"--max-kv-bytes {budget.max_kv_bytes:,} {at_context(context_tokens)}"
        limits.append(BudgetLimit(prices, float(budget.max_kv_bytes), option))
    return limits


def _total(limit: BudgetLimit, attentions: Sequence[Attention], plan: Plan) -> float:
    kept = []
    for attention in attentions:
        stays = set(plan.attentions[attention.path].keep)
        groups = members(Unit.KV_GROUP, attention.group_sizes)
        used = [g for g in groups if stays & {attention.query_ids[q] for q in g}]
        kept.append((len(stays), len(used)))
    return limit.prices.total(kept)


def _by_gates(
    model: Model, folder: Path, keep: float | int | None, constraints: Constraints
) -> _Decision:
    trained, attentions = fitted_gates(model.any_net, model.identity, folder)
    unit = trained.metadata.unit
    whole = [a for a in model.attentions if a.path not in trained.metadata.modules]
    sizes = unit_sizes(attentions, unit)
    budget = trained.metadata.kept_heads if keep is None else head_budget(keep, sizes)
    # units that training kept come first
    alpha = trained.log_alpha.double()
    scores = alpha + (alpha.max() - alpha.min() + 1.0) * trained.kept
    kept = kept_units(attentions, unit, scores, budget, [], constraints)
    if trained.metadata.refitted and kept != set(trained.kept.nonzero()[:, 0].tolist()):
        raise PlanError(
            "W_O was refitted to the heads that these gates keep, and --layout or "
            "--for keeps others. Leave these out, or train gates of another --unit."
        )
    plan = plan_keeping(attentions, unit, kept, model.identity, whole)
    seed = trained.metadata.seed
    evidence = Evidence(kind="gates", id=trained.id, keep=keep, seed=seed)
    return _Decision(plan, evidence, trained.weights or {})
