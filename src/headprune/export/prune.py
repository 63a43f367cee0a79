"""headprune prune: from gates or a plan to a folder that loads, with its proof."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headprune.config import CalibrationConfig, DataConfig, Dtype, LayoutOption
from headprune.data.calibration import calibration as calibration_of
from headprune.data.sources import refuse_missing_file
from headprune.errors import CheckpointError, PlanError
from headprune.evidence.score import reckons_with_refit
from headprune.export.publish import (
    Changes,
    OnModule,
    Pruned,
    Stage,
    check_shape,
    refuse_unprovable,
    write_proven,
)
from headprune.io.folders import digest_of
from headprune.io.outputs import claims_output
from headprune.model.attention import attention_of
from headprune.model.fitting import fitted_gates, fitted_scores
from headprune.model.legacy import has_pruned_heads
from headprune.model.loading import (
    load_config,
)
from headprune.model.opening import load, result_dtypes
from headprune.model.units import head_budget, refuse_target, unit_sizes
from headprune.planning.from_scores import even_units, plan_from_scores
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.gates import read_metadata
from headprune.schemas.plan import ModelIdentity, Plan, Shape, plan_content, read_plan
from headprune.schemas.records import Evidence, MadeBy, Migration, Pruning, Refit
from headprune.schemas.scores import read_scores
from headprune.surgery.cut import Cut, cut_heads, resolve, result_shape
from headprune.surgery.refit import refit as refit_outputs
from headprune.tensors.units import Unit, members


@dataclass(frozen=True)
class ShapeCost:
    """What a shape would cost.

    Attributes:
        shape: The value of ``--layout``.
        heads: Query heads that it keeps; None where it is not possible.
        evidence: Share of the expected open heads, by the gates, that it keeps.
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
    """What a cut would do.

    Attributes:
        plan: The plan.
        shape: How the result would be stored.
        parameters: Parameters before and after.
        kv_heads: KV heads before and after.
        shapes: With gates: what every shape would keep of the evidence.
    """

    plan: Plan
    shape: Shape
    parameters: tuple[int, int]
    kv_heads: tuple[int, int]
    shapes: tuple[ShapeCost, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For ``--dry-run --json``."""
        return {
            "shape": self.shape.value,
            "query_heads": [self.plan.query_heads, self.plan.kept_heads],
            "kv_heads": list(self.kv_heads),
            "parameters": list(self.parameters),
            "shapes": [asdict(cost) for cost in self.shapes],
            "plan": self.plan.model_dump(mode="json"),
        }


@claims_output("model", "gates", "plan", "scores", "refit")
def prune(
    model: str | Path,
    output: Path,
    gates: Path | None = None,
    plan: Path | Plan | None = None,
    scores: Path | None = None,
    criterion: str | None = None,
    keep: float | int | None = None,
    refit: DataConfig | None = None,
    calibration: CalibrationConfig | None = None,
    layout: LayoutOption = LayoutOption.PER_LAYER,
    overwrite: bool = False,
    dtype: Dtype = Dtype.AUTO,
    out_dtype: Dtype = Dtype.AUTO,
    trust_remote_code: bool = False,
    assume_supported: bool = False,
    drop_unexpected: bool = False,
    on_stage: Stage = lambda stage: None,
    on_module: OnModule = lambda done, total: None,
    made_by: MadeBy | None = None,
) -> Pruned:
    """Cuts heads out of a model and writes the result, proven, to ``output``.

    Args:
        model: Folder or hub id.
        output: Folder to write; it appears whole or not at all.
        gates: Folder that train-gates wrote. Exactly one of ``gates``, ``plan`` and ``scores`` is
            given.
        plan: A plan, or the path of a plan file.
        scores: Folder that score wrote; needs ``keep``.
        criterion: With ``scores``: which of them; None where there is one only.
        keep: A share (float) or count (int) of heads; with ``gates``, another than trained for.
        refit: Text on which W_O is refitted to make up for the heads that go.
        calibration: How much of that text is used.
        layout: What the result may look like.
        overwrite: Replace an existing output.
        dtype: Element type to compute in; "auto" is float32 for a checkpoint in half precision.
        out_dtype: Element type to write; "auto" is the checkpoint's, tensor by tensor.
        trust_remote_code: Allow code that comes with the model.
        assume_supported: Go on where the config has settings that the family's row does not know.
        drop_unexpected: Go on without tensors of the checkpoint that the model's class does not
            take.
        on_stage: Called with a few words before every stage.
        on_module: Called after every attention module whose W_O is refitted.
        made_by: The command, for the record, if it was one.

    Raises:
        HeadpruneError: If the input does not fit together, or the output cannot be written.
        ProofError: If the result does not compute what the gated original computes.
    """
    asked = _Asked(gates, plan, scores, criterion, keep)
    _refuse(asked, refit)
    on_stage("loading the model")
    net, source = load(model, dtype, trust_remote_code, assume_supported, drop_unexpected)
    stored = result_dtypes(net, model, out_dtype)
    chosen, evidence, weights = _plan(net, source, asked, layout)
    cuts = resolve(chosen, net, ragged=layout is LayoutOption.RAGGED)
    check_shape(layout, result_shape(cuts, net.config))
    _load_weights(net, weights)
    refitted = None
    if refit is not None:
        on_stage("testing the verification")
        refuse_unprovable(net, chosen)
        on_stage("refitting W_O")
        refitted = _refitted(net, model, cuts, refit, calibration, trust_remote_code, on_module)
    work = Changes(Pruning(evidence=evidence, trained_weights=bool(weights)), refitted, made_by)
    pruned = write_proven(net, source, model, chosen, cuts, output, stored, work, on_stage)
    return replace(pruned, warnings=(*pruned.warnings, *_warnings(evidence, chosen, refit)))


def _warnings(evidence: Evidence, chosen: Plan, refit: DataConfig | None) -> tuple[str, ...]:
    """Says where a cut does without the refit that its scores reckon with."""
    all_stay = chosen.kept_heads == chosen.query_heads
    if evidence.criterion is None or refit is not None or all_stay:
        return ()
    return reckons_with_refit(evidence.criterion)


@claims_output("model")
def migrate(
    model: str | Path,
    output: Path,
    overwrite: bool = False,
    dtype: Dtype = Dtype.AUTO,
    out_dtype: Dtype = Dtype.AUTO,
    trust_remote_code: bool = False,
    assume_supported: bool = False,
    drop_unexpected: bool = False,
    on_stage: Stage = lambda stage: None,
    made_by: MadeBy | None = None,
) -> Pruned:
    """Rewrites a folder in which transformers 4 pruned heads, so that transformers 5 loads it.

    Args:
        model: A folder whose config has ``pruned_heads``, or a result of headprune.
        output: Folder to write; it appears whole or not at all.
        overwrite: Replace an existing output.
        dtype: Element type to compute in; "auto" is float32 for a checkpoint in half precision.
        out_dtype: Element type to write; "auto" is the checkpoint's, tensor by tensor.
        trust_remote_code: Allow code that comes with the model.
        assume_supported: Go on where the config has settings that the family's row does not know.
        drop_unexpected: Go on without tensors of the checkpoint that the model's class does not
            take.
        on_stage: Called with a few words before every stage.
        made_by: The command, for the record, if it was one.

    Raises:
        CheckpointError: If nothing was pruned in it, or it cannot be read or written.
        ProofError: If the result does not compute what the old folder computes.
    """
    config = load_config(model, trust_remote_code=trust_remote_code)
    if not has_pruned_heads(config):
        raise CheckpointError(
            f"The config of '{model}' has no 'pruned_heads': it needs no migration, and loads as "
            "it is."
        )
    on_stage("loading the model")
    net, source = load(model, dtype, trust_remote_code, assume_supported, drop_unexpected)
    stored = result_dtypes(net, model, out_dtype)
    attentions = attention_of(net)
    chosen = plan_from_scores([], Unit.HEAD, [], 0, source, whole=attentions)
    cuts = resolve(chosen, net)
    work = Changes(Migration(), made_by=made_by)
    return write_proven(net, source, model, chosen, cuts, output, stored, work, on_stage)


def preview(
    model: str | Path,
    gates: Path | None = None,
    plan: Path | Plan | None = None,
    scores: Path | None = None,
    criterion: str | None = None,
    keep: float | int | None = None,
    layout: LayoutOption = LayoutOption.PER_LAYER,
    dtype: Dtype = Dtype.AUTO,
    trust_remote_code: bool = False,
    assume_supported: bool = False,
    drop_unexpected: bool = False,
) -> Preview:
    """Says what ``prune`` would do with the same arguments, and writes nothing."""
    asked = _Asked(gates, plan, scores, criterion, keep)
    _refuse(asked)
    net, source = load(model, dtype, trust_remote_code, assume_supported, drop_unexpected)
    chosen, _, _ = _plan(net, source, asked, layout)
    cuts = resolve(chosen, net, ragged=layout is LayoutOption.RAGGED)
    stored = result_shape(cuts, net.config)
    check_shape(layout, stored)
    before = (net.num_parameters(), sum(cut.attention.kv_heads for cut in cuts))
    costs = () if gates is None else _shape_costs(net, source, gates, keep)
    cut_heads(net, cuts)
    after = (net.num_parameters(), sum(cut.attention.kv_heads for cut in cuts))
    return Preview(chosen, stored, (before[0], after[0]), (before[1], after[1]), costs)


def _shape_costs(
    net: PreTrainedModel, source: ModelIdentity, gates: Path, keep: float | int | None
) -> tuple[ShapeCost, ...]:
    """What every shape would keep of the evidence."""
    trained, attentions = fitted_gates(net, source, gates)
    evidence, costs = trained.open_probability(), []
    for layout in LayoutOption:
        try:
            plan, _, _ = _plan_from_gates(net, source, gates, keep, layout)
            cuts = resolve(plan, net, ragged=layout is LayoutOption.RAGGED)
            stored = result_shape(cuts, net.config)
            check_shape(layout, stored)
        except PlanError as error:
            costs.append(ShapeCost(layout.value, None, None, None, str(error).split(". ")[0] + "."))
            continue
        stays = {(path, head) for path, part in plan.attentions.items() for head in part.keep}
        kept, index = 0.0, 0
        for attention in attentions:
            for unit in members(trained.metadata.unit, attention.group_sizes):
                inside = (attention.path, attention.query_ids[unit[0]]) in stays
                kept += float(evidence[index]) * len(unit) * inside
                index += 1
        sizes = torch.tensor(unit_sizes(attentions, trained.metadata.unit))
        share = kept / float((evidence * sizes).sum())
        costs.append(ShapeCost(layout.value, plan.kept_heads, share, stored.value, None))
    return tuple(costs)


@dataclass(frozen=True)
class _Asked:
    """Where a plan is to come from, as it was asked for."""

    gates: Path | None
    plan: Path | Plan | None
    scores: Path | None
    criterion: str | None
    keep: float | int | None


def _refuse(asked: _Asked, refit: DataConfig | None = None) -> None:
    """Refuses what does not fit together, whatever the model, before it is loaded.

    Raises:
        HeadpruneError: Saying what does not fit.
    """
    gates, plan, scores, keep = asked.gates, asked.plan, asked.scores, asked.keep
    if sum(given is not None for given in (gates, plan, scores)) != 1:
        raise PlanError(
            "Give one of --gates (from train-gates), --scores (from score) and --plan (a file)."
        )
    if plan is not None and keep is not None:
        raise PlanError(
            "--keep goes with --gates or --scores; a plan already says which heads stay."
        )
    if scores is None and asked.criterion is not None:
        raise PlanError("--criterion goes with --scores; gates and plans have none.")
    if scores is not None:
        found = read_scores(scores)
        if keep is None:
            raise PlanError("--scores needs --keep, the share or count of heads that stay.")
        found.of(asked.criterion)
    refuse_target(keep)
    if isinstance(plan, Path):
        plan_content(plan)
    trained = gates is not None and read_metadata(gates).trained_weights
    if refit is not None and trained:
        raise PlanError(
            "--refit fits W_O to the original's outputs, but these gates come with trained "
            "weights, which compute something else. Leave out --refit, or train with --train gates."
        )
    if refit is not None:
        refuse_missing_file(refit.source)


def _plan(
    net: PreTrainedModel, source: ModelIdentity, asked: _Asked, layout: LayoutOption
) -> tuple[Plan, Evidence, dict[str, Tensor]]:
    """The plan, what it was made of, and the trained weights that belong to it."""
    if asked.gates is not None:
        return _plan_from_gates(net, source, asked.gates, asked.keep, layout)
    if asked.scores is not None:
        return *_plan_from_scores(net, source, asked, layout), {}
    assert asked.plan is not None
    plan = asked.plan
    if isinstance(plan, Path):
        present = {a.path: (a.query_ids, a.kv_heads) for a in attention_of(net)}
        plan = read_plan(plan, present)
    _refuse_merging(plan)
    return plan, Evidence(kind="plan", id=digest_of(plan.model_dump(mode="json"))), {}


def _refuse_merging(plan: Plan) -> None:
    """Refuses a plan that a cut alone does not carry out."""
    if plan.merged:
        how = f" (by {plan.merge})" if plan.merge else ""
        counts = [len(part.groups or range(part.kv_heads)) for part in plan.attentions.values()]
        raise PlanError(
            f"The plan merges KV heads{how}, the first in '{plan.merged[0]}', and a cut merges "
            f"none: headprune convert-gqa with --kv-heads {','.join(map(str, counts))} makes such "
            "a model."
        )


def _plan_from_scores(
    net: PreTrainedModel, source: ModelIdentity, asked: _Asked, layout: LayoutOption
) -> tuple[Plan, Evidence]:
    assert asked.scores is not None
    assert asked.keep is not None
    found = read_scores(asked.scores, source)
    unit, attentions = found.metadata.unit, fitted_scores(net, found)
    whole = [a for a in attention_of(net) if a.path not in found.metadata.modules]
    sizes = unit_sizes(attentions, unit)
    budget = head_budget(asked.keep, sizes)
    criterion, values = found.of(asked.criterion)
    scores = values.tolist()
    if layout is LayoutOption.UNIFORM:
        scores, budget = _even(attentions, unit, scores, budget)
    evidence = Evidence(
        kind="scores",
        id=found.id,
        criterion=criterion,
        keep=asked.keep,
        seed=found.metadata.calibration.seed,
    )
    return plan_from_scores(attentions, unit, scores, budget, source, whole=whole), evidence


def _even(
    attentions: list[Attention], unit: Unit, scores: list[float], budget: int
) -> tuple[list[float], int]:
    """Scores and budget that lead to the same cut in every module."""
    sizes = unit_sizes(attentions, unit)
    even = even_units(attentions, unit, scores, budget)
    return [float(p in set(even)) for p in range(len(sizes))], sum(sizes[p] for p in even)


def _refitted(
    net: PreTrainedModel,
    model: str | Path,
    cuts: list[Cut],
    data: DataConfig,
    config: CalibrationConfig | None,
    trust_remote_code: bool,
    on_module: OnModule,
) -> Refit:
    """Refits W_O of a model that is about to be cut, in place; says what that did."""
    config = config or CalibrationConfig()
    examples = calibration_of(net, model, data, config, "--refit", trust_remote_code)
    attentions = [cut.attention for cut in cuts]
    gates = [cut.gate() for cut in cuts]
    records = refit_outputs(net, attentions, gates, examples.whole(), on_module)
    ridges = {r.path: r.ridge for r in records if math.isfinite(r.ridge)}  # the others stay
    return Refit(
        data=data.source,
        tokens=examples.tokens,
        modules=len(records),
        error_before=sum(r.before for r in records) / max(len(records), 1),
        error_after=sum(r.after for r in records) / max(len(records), 1),
        ridges=ridges,
        seed=config.seed,
    )


def _plan_from_gates(
    net: PreTrainedModel,
    source: ModelIdentity,
    folder: Path,
    keep: float | int | None,
    layout: LayoutOption,
) -> tuple[Plan, Evidence, dict[str, Tensor]]:
    trained, attentions = fitted_gates(net, source, folder)
    unit = trained.metadata.unit
    whole = [a for a in attention_of(net) if a.path not in trained.metadata.modules]
    sizes = unit_sizes(attentions, unit)
    budget = trained.metadata.kept_heads if keep is None else head_budget(keep, sizes)
    # units that training kept come first; one that --keep brings back is fully open
    scores = (trained.log_alpha + 1e6 * trained.kept).tolist()
    scale = torch.where(trained.kept, trained.value, 1.0).tolist()
    if layout is LayoutOption.UNIFORM:
        scores, budget = _even(attentions, unit, scores, budget)
    plan = plan_from_scores(attentions, unit, scores, budget, source, scale, whole)
    seed = trained.metadata.seed
    evidence = Evidence(kind="gates", id=trained.id, keep=keep, seed=seed)
    return plan, evidence, trained.weights or {}


@torch.no_grad()
def _load_weights(net: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    parameters = dict(net.named_parameters())
    for name, value in weights.items():
        parameters[name].copy_(value)
