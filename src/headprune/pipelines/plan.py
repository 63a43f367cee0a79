"""headprune plan: from scores and budgets to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headprune.checkpoint.scores import Scores, read_scores
from headprune.config import BudgetConfig
from headprune.criteria import CRITERIA
from headprune.errors import CheckpointError, PlanError
from headprune.evaluation.speed import measure
from headprune.models.allocation import Limit, allocate
from headprune.models.attention import attention_of
from headprune.models.budgets import cache_prices, parameter_prices, time_prices
from headprune.models.planning import head_budget, plan_from_scores, unit_sizes
from headprune.pipelines.calibration import calibration
from headprune.pipelines.prune import load
from headprune.pipelines.score import Watch, gather, scores_of
from headprune.plan import ModelIdentity, Plan
from headprune.runtime.modeling_headprune import Attention
from headprune.tensors.units import Unit, members

PROMPT = 256  # tokens of the prefill that --min-speedup is measured on


@dataclass(frozen=True)
class Planned:
    """A plan, and what it spends.

    Attributes:
        plan: The plan.
        criterion: What it was made by.
        spent: Per budget: what was asked for, and what the plan comes to.
        rounds: How often heads were scored.
    """

    plan: Plan
    criterion: str
    spent: dict[str, tuple[float, float]]
    rounds: int


def plan(
    model: str | Path,
    scores: Path,
    budget: BudgetConfig,
    output: Path | None = None,
    criterion: str | None = None,
    rounds: int = 1,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    assume_supported: bool = False,
    watch: Watch | None = None,
) -> Planned:
    """Makes a plan from scores.

    Args:
        model: Folder or hub id; the one that was scored.
        scores: The scores folder.
        budget: What may stay.
        output: The plan file to write; None for none.
        criterion: Which of the scores; None where there is one only.
        rounds: How often to score: after the first round on the model without the heads that have
            gone, on the data the scores came from. Equally many heads go in every round.
        overwrite: Replace an existing output.
        trust_remote_code: Allow code that comes with the model.
        assume_supported: Go on where the config has settings that the family's row does not know.
        watch: Told how far it is.

    Raises:
        HeadpruneError: If model, scores and budgets do not fit together.
    """
    watch = watch or Watch()
    if output is not None and output.exists() and not overwrite:
        raise CheckpointError(
            f"The output '{output}' already exists. Choose another one, or replace it with "
            "--overwrite."
        )
    watch.stage("loading the model")
    dtype = read_scores(scores).metadata.calibration.dtype
    net, source = load(model, dtype, trust_remote_code, assume_supported)
    found = read_scores(scores, source)
    planned = make_plan(net, source, model, found, budget, criterion, rounds, watch)
    if output is not None:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            planned.plan.write(output)
        except OSError as error:
            raise CheckpointError(f"Could not write '{output}': {error}.") from None
    return planned


def make_plan(
    net: PreTrainedModel,
    source: ModelIdentity,
    model: str | Path,
    scores: Scores,
    budget: BudgetConfig,
    criterion: str | None = None,
    rounds: int = 1,
    watch: Watch | None = None,
) -> Planned:
    """Makes a plan for a loaded model; arguments as for ``plan``.

    Raises:
        PlanError: If the budgets cannot be kept to.
    """
    watch = watch or Watch()
    name, values = scores.of(criterion)
    everything = attention_of(net)
    attentions = [a for a in everything if a.path in scores.metadata.modules]
    whole = [a for a in everything if a.path not in scores.metadata.modules]
    unit, sizes = scores.metadata.unit, unit_sizes(attentions, scores.metadata.unit)
    limits = _limits(net, attentions, budget, watch)
    target = None if budget.keep is None else head_budget(budget.keep, sizes)
    kept = set(range(len(sizes)))
    for number in range(rounds):
        if number:
            values = _again(net, model, scores, name, attentions, kept, watch)
        last = number == rounds - 1
        heads, at_least = target, budget.min_per_layer
        if not last:
            goal = (
                target if target is not None else _reached(attentions, unit, values, budget, limits)
            )
            heads = head_budget(_between(sum(sizes), goal, number + 1, rounds) / sum(sizes), sizes)
        kept = _chosen(
            attentions, unit, values, kept, heads, budget, at_least, limits if last else ()
        )
    flags = [float(at in kept) for at in range(len(sizes))]
    left = sum(size for at, size in enumerate(sizes) if at in kept)
    made = plan_from_scores(attentions, unit, flags, left, source, whole=whole)
    spent = {limit.said: (limit.most, _total(limit, attentions, made)) for limit in limits}
    return Planned(made, name, spent, rounds)


def _chosen(
    attentions: Sequence[Attention],
    unit: Unit,
    values: Tensor,
    allowed: set[int],
    heads: int | None,
    budget: BudgetConfig,
    at_least: int,
    limits: Sequence[Limit],
) -> set[int]:
    """Units to keep, of those that are still there."""
    gone = [at for at in range(len(values)) if at not in allowed]
    ranked = values.clone()
    if gone:  # a unit that went in an earlier round comes behind all that are there
        ranked[gone] = float(values.min()) - float(values.max() - values.min()) - 1.0
    of_module = None
    if budget.per_layer:
        if heads is None:
            raise PlanError("--per-layer needs --keep, the number or share of heads to keep.")
        of_module = _per_module(attentions, unit, heads)
        heads = None
    return set(allocate(attentions, unit, ranked.tolist(), heads, of_module, at_least, limits))


def _per_module(attentions: Sequence[Attention], unit: Unit, heads: int) -> list[int]:
    """The same share of heads in every module, as nearly as whole units allow."""
    share = heads / max(sum(a.query_heads for a in attentions), 1)
    counts = [head_budget(share, unit_sizes([a], unit)) if a.query_heads else 0 for a in attentions]
    return counts


def _again(
    net: PreTrainedModel,
    model: str | Path,
    scores: Scores,
    name: str,
    attentions: Sequence[Attention],
    kept: set[int],
    watch: Watch,
) -> Tensor:
    """Scores of the model as it is without the units that have gone."""
    metadata, needs = scores.metadata, CRITERIA[name].needs
    if metadata.data is None or "gates" in needs:
        raise PlanError(
            f"--rounds: the criterion {name} does not look at the model again. Leave out --rounds, "
            "or use one that does, such as fisher or reconstruction."
        )
    gates, at = [], 0
    for attention in attentions:
        gate = torch.ones(attention.query_heads)
        for unit in members(metadata.unit, attention.group_sizes):
            if at not in kept:
                gate[unit] = 0.0
            at += 1
        gates.append(gate)
    examples = calibration(net, model, metadata.data, metadata.calibration, "plan")
    seed = metadata.calibration.seed
    evidence = gather(net, attentions, metadata.unit, needs, examples, seed, gates, watch)
    return scores_of(name, evidence, attentions, metadata.unit)


def _limits(
    net: PreTrainedModel, attentions: Sequence[Attention], budget: BudgetConfig, watch: Watch
) -> list[Limit]:
    limits = []
    if budget.max_params is not None:
        prices = parameter_prices(net, attentions)
        limits.append(Limit(prices, budget.max_params, f"--max-params {budget.max_params:,}"))
    if budget.max_kv_bytes is not None:
        prices = cache_prices(net, attentions)
        limits.append(Limit(prices, budget.max_kv_bytes, f"--max-kv-bytes {budget.max_kv_bytes:,}"))
    if budget.min_speedup is not None:
        watch.stage("measuring the speed")
        prices = time_prices(net, attentions, _prefill_seconds)
        present = [(a.query_heads, a.kv_heads) for a in attentions]
        most = prices.total(present) / budget.min_speedup
        limits.append(Limit(prices, most, f"--min-speedup {budget.min_speedup}"))
    return limits


def _prefill_seconds(nets: Sequence[PreTrainedModel]) -> list[float]:
    speeds = measure(nets, prompt_tokens=PROMPT, decoded=2)
    return [speed.prompt_tokens / speed.prefill_tokens_per_s for speed in speeds]


def _reached(
    attentions: Sequence[Attention],
    unit: Unit,
    values: Tensor,
    budget: BudgetConfig,
    limits: Sequence[Limit],
) -> int:
    """Heads that the limits would leave by the present scores."""
    kept = allocate(attentions, unit, values.tolist(), None, None, budget.min_per_layer, limits)
    sizes = unit_sizes(attentions, unit)
    return sum(sizes[at] for at in kept)


def _between(start: int, goal: int, number: int, rounds: int) -> float:
    return start + (goal - start) * number / rounds


def _total(limit: Limit, attentions: Sequence[Attention], made: Plan) -> float:
    kept = []
    for attention in attentions:
        stays = set(made.attentions[attention.path].keep)
        groups = members(Unit.KV_GROUP, attention.group_sizes)
        used = [g for g in groups if stays & {attention.query_ids[q] for q in g}]
        kept.append((len(stays), len(used)))
    return limit.prices.total(kept)
