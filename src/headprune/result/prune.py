"""headprune prune and migrate: gates, scores or a plan become an edit, and that a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headprune.config import CalibrationConfig, DataConfig, Dtype, ProofOption, Writing
from headprune.context import Context
from headprune.data.batches import calibration as calibration_of
from headprune.errors import CheckpointError, PlanError
from headprune.evidence.score import refit_warnings
from headprune.io.outputs import claims_output
from headprune.model.loading import has_pruned_heads
from headprune.model.open import Model, open_model
from headprune.planning.choose import ChosenCuts, CutRequest, choose, refuse_request
from headprune.planning.from_scores import plan_keeping
from headprune.proof.twins import refuse_unproven
from headprune.result.refitting import JudgedRefit, judged_refit
from headprune.result.write import Changes, Proposal, Pruned, refuse_unprovable, write
from headprune.schemas.records import Migration, Pruning
from headprune.surgery.edit import Edit
from headprune.tensors.units import Unit


@claims_output("model", "request.gates", "request.plan", "request.scores", "refit")
def prune(
    model: str | Path,
    output: Path,
    request: CutRequest,
    refit: DataConfig | None = None,
    calibration: CalibrationConfig = CalibrationConfig(),
    writing: Writing = Writing(),
    context: Context = Context(),
) -> Pruned:
    """Remove heads from a model and write the result, proven, to ``output``.

    Args:
        model: Folder or hub id.
        output: Folder to write; it appears whole or not at all.
        request: The heads to remove.
        refit: Text to refit W_O on.
        calibration: NonNegativeInt of that text, and the element type to compute in.
        writing: Element types, kind of proof, size of shards.
        context: Progress and permissions.

    Raises:
        HeadpruneError: If the input does not fit together, or the output cannot be written.
        ProofError: If the result does not compute as the gated original.
    """
    refuse_request(request, refit)
    context.stage("reading the headers")
    opened = open_model(model, calibration.dtype, context.allowed, calibrates=refit is not None)
    refuse_unproven(opened, context, writing.proof)
    chosen = choose(opened, request)
    proposal = propose_removal(opened, chosen, refit, calibration, writing, context)
    pruned = write(opened, proposal.edit, output, proposal.changes, writing, context)
    return replace(pruned, warnings=(*pruned.warnings, *proposal.warnings))


def propose_removal(
    model: Model,
    chosen: ChosenCuts,
    refit: DataConfig | None,
    calibration: CalibrationConfig,
    writing: Writing,
    context: Context,
    reports: bool = True,
) -> Proposal:
    """Refit W_O to the heads that stay in an opened model.

    Arguments as for ``prune``; ``reports`` as for ``judged_refit``.

    Raises:
        HeadpruneError: If the input does not fit together.
        ProofError: If a proof of the result would show nothing.
    """
    edit, judged = Edit(chosen.plan, chosen.weights), JudgedRefit(None, None)
    if (refit is not None or chosen.weights) and writing.proof is ProofOption.TENSORS:
        raise PlanError(
            "proof=tensors compares the result with the checkpoint, and --refit and gates with "
            "trained weights change weights. Leave it out."
        )
    warnings = _unrefitted(chosen.evidence.criterion, edit)
    if refit is not None:
        edit, judged = _refitted(model, edit, refit, calibration, writing, context, reports)
        warnings = judged.warnings
    done = Pruning(
        evidence=chosen.evidence,
        trained_weights=bool(chosen.weights),
        refit_left_out=None if judged.taken else judged.worth,
    )
    return Proposal(edit, Changes(done, judged.taken), (*warnings, *chosen.padding))


def _refitted(
    model: Model,
    edit: Edit,
    text: DataConfig,
    calibration: CalibrationConfig,
    writing: Writing,
    context: Context,
    reports: bool,
) -> tuple[Edit, JudgedRefit]:
    """Refit W_O of an edit; the edit as it is, where that does not help."""
    context.stage("testing the verification")
    refuse_unprovable(model, edit.plan)
    context.stage("loading the model")
    net = model.net
    model.result_dtypes(writing.out_dtype)  # refuses an overflow before long work
    context.stage("refitting W_O")
    examples = calibration_of(net, model.tokenizer, text, calibration, "--refit")
    judged = judged_refit(net, edit, examples, text.source, calibration.seed, context, reports)
    return replace(edit, tensors=judged.tensors), judged


def _unrefitted(criterion: str | None, edit: Edit) -> tuple[str, ...]:
    """Warn where a cut does without the refit that its scores assume."""
    if criterion is None or edit.plan.kept_heads == edit.plan.query_heads:
        return ()
    return refit_warnings(criterion)


def whole(model: Model) -> Edit:
    """Return the edit that leaves a model as it is."""
    return Edit(plan_keeping([], Unit.HEAD, [], model.identity, model.attentions))


@claims_output("model")
def migrate(
    model: str | Path,
    output: Path,
    dtype: Dtype = Dtype.AUTO,
    writing: Writing = Writing(),
    context: Context = Context(),
) -> Pruned:
    """Rewrite a folder in which transformers 4 pruned heads, so that transformers 5 loads it.

    Args:
        model: A folder whose config has ``pruned_heads``.
        output: Folder to write; it appears whole or not at all.
        dtype: Element type to compute in; "auto" is float32 for a checkpoint in half precision.
        writing: Element types, kind of proof, size of shards.
        context: Progress and permissions.

    Raises:
        CheckpointError: If nothing was pruned in it, or it cannot be read or written.
        ProofError: If the result does not compute as the old folder.
    """
    context.stage("reading the headers")
    opened = open_model(model, dtype, context.allowed)
    if not has_pruned_heads(opened.config):
        raise CheckpointError(
            f"The config of '{model}' has no 'pruned_heads': it needs no migration, and loads as "
            "it is."
        )
    return write(opened, whole(opened), output, Changes(Migration()), writing, context)
