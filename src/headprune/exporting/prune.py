"""headprune prune: from gates or a plan to a folder that loads, with its proof."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headprune.config import CalibrationConfig, DataConfig, Dtype, ProofOption, Writing
from headprune.context import Allowed, Context
from headprune.data.calibration import calibration as calibration_of
from headprune.errors import CheckpointError, PlanError
from headprune.evidence.score import reckons_with_refit
from headprune.exporting.publish import (
    Changes,
    Pruned,
    WriteOrder,
    refuse_unprovable,
)
from headprune.exporting.refitting import JudgedRefit, judged_refit
from headprune.exporting.streamed import write_streamed
from headprune.io.outputs import claims_output
from headprune.model.attention import attention_of
from headprune.model.legacy import has_pruned_heads
from headprune.model.loading import (
    load_config,
)
from headprune.model.opening import load, result_dtypes
from headprune.model.residency import present
from headprune.planning.from_evidence import CutRequest, cuts_by, refuse_request
from headprune.planning.from_scores import plan_from_scores
from headprune.schemas.plan import Plan
from headprune.schemas.records import Evidence, Migration, Pruning
from headprune.surgery.cut import resolve
from headprune.tensors.units import Unit


@claims_output("model", "asked.gates", "asked.plan", "asked.scores", "refit")
def prune(
    model: str | Path,
    output: Path,
    asked: CutRequest,
    refit: DataConfig | None = None,
    calibration: CalibrationConfig = CalibrationConfig(),
    writing: Writing = Writing(),
    context: Context = Context(),
) -> Pruned:
    """Cuts heads out of a model and writes the result, proven, to ``output``.

    Args:
        model: Folder or hub id.
        output: Folder to write; it appears whole or not at all.
        asked: What is cut.
        refit: Text on which W_O is refitted to make up for the heads that go.
        calibration: How much of that text is used, and the element type to compute in.
        writing: How the result is written.
        context: What it runs in.

    Raises:
        HeadpruneError: If the input does not fit together, or the output cannot be written.
        ProofError: If the result does not compute what the gated original computes.
    """
    refuse_request(asked, refit)
    context.stage("reading the headers")
    opening = (model, calibration.dtype, context.allowed)
    net, source = load(*opening, weights=False)
    chosen = cuts_by(net, source, asked)
    plan, weights = chosen.plan, chosen.weights
    stored = result_dtypes(net, model, writing.out_dtype)
    judged, changed = JudgedRefit(None, None), [*weights]
    whole: Callable[[], PreTrainedModel] = partial(_whole, *opening, writing, weights)
    if refit is not None or weights:
        _refuse_tensors(writing.proof)
    if refit is not None:
        context.stage("loading the model")
        loaded = whole()
        context.stage("testing the verification")
        refuse_unprovable(loaded, plan)
        context.stage("refitting W_O")
        remote = context.allowed.trust_remote_code
        examples = calibration_of(loaded, model, refit, calibration, "--refit", remote)
        lost = resolve(plan, loaded, ragged=True)
        judged = judged_refit(loaded, lost, examples, refit.source, calibration.seed, context)
        changed = _outputs(loaded)
        whole = [loaded].pop  # it is let go once it was probed
        del loaded
    done = Pruning(
        evidence=chosen.evidence,
        trained_weights=bool(weights),
        refit_left_out=None if judged.taken else judged.worth,
    )
    work = Changes(done, judged.taken, context.made_by)
    order = WriteOrder(source, model, plan, output, stored, work, writing)
    pruned = write_streamed(net, chosen.cuts, order, context, whole, changed)
    said = judged.warnings if refit is not None else _warnings(chosen.evidence, plan)
    return replace(pruned, warnings=(*pruned.warnings, *said, *chosen.padding))


def _whole(
    model: str | Path,
    dtype: Dtype,
    allowed: Allowed,
    writing: Writing,
    weights: dict[str, Tensor],
) -> PreTrainedModel:
    """The model with its weights, those that were trained among them."""
    net, _ = load(model, dtype, allowed)
    result_dtypes(net, model, writing.out_dtype)  # refuses what cannot be written
    _load_weights(net, weights)
    return net


def _outputs(net: PreTrainedModel) -> list[str]:
    """The weights that a refit changes: W_O and its biases."""
    projections = [p for a in attention_of(net) for p in a.projections if p.holds == "o"]
    return [f"{p.path}.{name}" for p in projections for name, _ in p.module.named_parameters()]


def _refuse_tensors(proof: ProofOption) -> None:
    """Refuses to compare tensors with weights that are others by now.

    Raises:
        PlanError: Saying so.
    """
    if proof is ProofOption.TENSORS:
        raise PlanError(
            "proof=tensors compares the result with the checkpoint, and --refit and gates with "
            "trained weights change weights. Leave it out."
        )


def _warnings(evidence: Evidence, chosen: Plan) -> tuple[str, ...]:
    """Says where a cut does without the refit that its scores reckon with."""
    if evidence.criterion is None or chosen.kept_heads == chosen.query_heads:
        return ()
    return reckons_with_refit(evidence.criterion)


@claims_output("model")
def migrate(
    model: str | Path,
    output: Path,
    dtype: Dtype = Dtype.AUTO,
    writing: Writing = Writing(),
    context: Context = Context(),
) -> Pruned:
    """Rewrites a folder in which transformers 4 pruned heads, so that transformers 5 loads it.

    Args:
        model: A folder whose config has ``pruned_heads``, or a result of headprune.
        output: Folder to write; it appears whole or not at all.
        dtype: Element type to compute in; "auto" is float32 for a checkpoint in half precision.
        writing: How the result is written.
        context: What it runs in.

    Raises:
        CheckpointError: If nothing was pruned in it, or it cannot be read or written.
        ProofError: If the result does not compute what the old folder computes.
    """
    config = load_config(model, trust_remote_code=context.allowed.trust_remote_code)
    if not has_pruned_heads(config):
        raise CheckpointError(
            f"The config of '{model}' has no 'pruned_heads': it needs no migration, and loads as "
            "it is."
        )
    context.stage("reading the headers")
    opening = (model, dtype, context.allowed)
    net, source = load(*opening, weights=False)
    stored = result_dtypes(net, model, writing.out_dtype)
    chosen = plan_from_scores([], Unit.HEAD, [], 0, source, whole=attention_of(net))
    work = Changes(Migration(), made_by=context.made_by)
    order = WriteOrder(source, model, chosen, output, stored, work, writing)
    whole = partial(_whole, *opening, writing, {})
    return write_streamed(net, resolve(chosen, net), order, context, whole)


@torch.no_grad()
def _load_weights(net: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    for name, value in weights.items():
        owner, _, last = name.rpartition(".")
        module = net.get_submodule(owner)
        with present(module):
            module.get_parameter(last).copy_(value)
