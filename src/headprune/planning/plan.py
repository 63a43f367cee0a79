"""headprune plan: from scores and budgets to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from headprune.config import LayoutOption, PlanConfig
from headprune.context import Context
from headprune.evidence.score import reckons_with_refit
from headprune.io.outputs import claims_output
from headprune.io.ownership import PLAN
from headprune.model.attention import attention_of
from headprune.model.cost import stated_context
from headprune.model.open import Model, open_model
from headprune.model.units import fitted_scores, head_budget, refuse_target, unit_sizes
from headprune.planning.allocation import BudgetLimit
from headprune.planning.budgets import cache_prices, parameter_prices
from headprune.planning.choice import HeadChoice
from headprune.planning.constraints import Constraints, constraints_of
from headprune.planning.from_scores import plan_from_scores
from headprune.planning.roles import asked_roles, held_units, refuse_broken_hold, roles_lost
from headprune.render.blocks import at_context
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.plan import ModelIdentity, Plan
from headprune.schemas.records import Evidence
from headprune.schemas.scores import Scores, ScoresMetadata, read_scores
from headprune.surgery.cut import resolve
from headprune.tensors.units import Unit, members


@dataclass(frozen=True)
class Planned:
    """A plan and its spending.

    Attributes:
        plan: The plan.
        evidence: The evidence of the choice.
        spent: Per budget: the limit, and the plan's sum.
        scores: Metadata of the scores.
        roles_lost: Roles that lose their last head; None without a record of roles.
    """

    plan: Plan
    evidence: Evidence
    spent: dict[str, tuple[float, float]]
    scores: ScoresMetadata
    roles_lost: tuple[str, ...] | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings before a cut by it, a sentence each."""
        return reckons_with_refit(self.criterion)

    @property
    def criterion(self) -> str:
        """The criterion of the scores."""
        assert self.evidence.criterion is not None
        return self.evidence.criterion


@claims_output("model", "scores", kind=PLAN)
def plan(
    model: str | Path,
    scores: Path,
    config: PlanConfig,
    output: Path | None = None,
    overwrite: bool = False,
    context: Context = Context(),
    layout: LayoutOption = LayoutOption.PER_LAYER,
) -> Planned:
    """Make a plan from scores.

    Args:
        model: Folder or hub id of the scored model.
        scores: The scores folder.
        config: What may stay, and how it is chosen.
        output: The plan file to write; None for none.
        overwrite: Replace an existing output.
        context: Progress and permissions.
        layout: Shapes of the result.

    Raises:
        HeadpruneError: If model, scores and budgets do not fit together.
    """
    stored = read_scores(scores)
    stored.of(config.criterion)
    refuse_target(config.keep)
    asked_roles(config)
    context.stage("loading the model")
    opened = open_model(model, stored.metadata.calibration.dtype, context.allowed)
    planned = make_plan(opened, read_scores(scores, opened.identity), config, layout)
    if output is not None:
        planned.plan.write(output)
    return planned


def make_plan(
    model: Model,
    scores: Scores,
    config: PlanConfig,
    layout: LayoutOption = LayoutOption.PER_LAYER,
    empty_layers: bool = True,
) -> Planned:
    """Make a plan for an opened model; arguments as for ``plan``.

    Without ``empty_layers``, every layer keeps a head.

    Raises:
        PlanError: If the budgets cannot be kept to.
    """
    net = model.any_net
    constraints = constraints_of(net, layout, config.targets, empty_layers)
    stored = model.result_dtypes(config.out_dtype).default
    planned = planned_by(net, model.identity, scores, config, constraints, stored)
    if layout is not LayoutOption.PADDED and constraints != Constraints(net):
        constraints.check(resolve(planned.plan, net, ragged=True))
    return planned


def planned_by(
    net: PreTrainedModel,
    source: ModelIdentity,
    scores: Scores,
    config: PlanConfig,
    constraints: Constraints,
    stored: torch.dtype,
) -> Planned:
    """Make a plan in some shapes; ``stored`` is the type that the result's KV cache has.

    Raises:
        PlanError: If the budgets cannot be kept to.
    """
    name, values = scores.of(config.criterion)
    attentions = fitted_scores(net, scores)
    whole = [a for a in attention_of(net) if a.path not in scores.metadata.modules]
    unit, sizes = scores.metadata.unit, unit_sizes(attentions, scores.metadata.unit)
    record = asked_roles(config, source)
    held = held_units(record, config.keep_roles, attentions, unit)
    limits = _limits(net, attentions, config, stored)
    heads = None if config.keep is None else head_budget(config.keep, sizes)
    kept = HeadChoice(attentions, unit, limits, constraints, held).of(values, heads)
    refuse_broken_hold(held, kept, sizes, config.keep_roles)
    flags = [float(at in kept) for at in range(len(sizes))]
    left = sum(size for at, size in enumerate(sizes) if at in kept)
    plan = plan_from_scores(attentions, unit, flags, left, source, whole=whole)
    spent = {limit.option: (limit.most, _total(limit, attentions, plan)) for limit in limits}
    seed = scores.metadata.calibration.seed
    evidence = Evidence(kind="scores", id=scores.id, criterion=name, keep=config.keep, seed=seed)
    return Planned(plan, evidence, spent, scores.metadata, roles_lost(record, plan))


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
        context_tokens = stated_context(net)
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
