"""headprune prune: from gates or a plan to a folder that loads, with its proof."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headprune.config import CalibrationConfig, DataConfig, Dtype, LayoutOption, ProofOption, Target
from headprune.data.calibration import calibration as calibration_of
from headprune.errors import CheckpointError, PlanError
from headprune.evidence.score import reckons_with_refit
from headprune.exporting.publish import (
    Changes,
    OnModule,
    Pruned,
    Stage,
    WriteOrder,
    refuse_unprovable,
)
from headprune.exporting.refitting import JudgedRefit, judged_refit
from headprune.exporting.streamed import Streaming, write_streamed
from headprune.io.outputs import claims_output
from headprune.io.shards import SHARD
from headprune.model.attention import attention_of
from headprune.model.legacy import has_pruned_heads
from headprune.model.loading import (
    load_config,
)
from headprune.model.opening import load, result_dtypes
from headprune.model.residency import present
from headprune.planning.constraints import constraints_of
from headprune.planning.from_evidence import PlanSource, plan_from, refuse_source
from headprune.planning.from_scores import plan_from_scores
from headprune.planning.padding import laid_out
from headprune.schemas.plan import Plan
from headprune.schemas.records import Evidence, MadeBy, Migration, Pruning
from headprune.surgery.cut import resolve
from headprune.tensors.units import Unit


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
    targets: Sequence[Target] = (),
    tensor_parallel: int = 1,
    overwrite: bool = False,
    dtype: Dtype = Dtype.AUTO,
    out_dtype: Dtype = Dtype.AUTO,
    trust_remote_code: bool = False,
    assume_supported: bool = False,
    drop_unexpected: bool = False,
    on_stage: Stage = lambda stage: None,
    on_module: OnModule = lambda done, total: None,
    made_by: MadeBy | None = None,
    proof: ProofOption = ProofOption.AUTO,
    max_shard_size: str = SHARD,
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
        targets: Where it is to run.
        tensor_parallel: Devices that share the heads of every layer.
        overwrite: Replace an existing output.
        dtype: Element type to compute in; "auto" is float32 for a checkpoint in half precision.
        out_dtype: Element type to write; "auto" is the checkpoint's, tensor by tensor.
        trust_remote_code: Allow code that comes with the model.
        assume_supported: Go on where the config has settings that the family's row does not know.
        drop_unexpected: Go on without tensors of the checkpoint that the model's class does not
            take.
        on_stage: Called with a few words before every stage.
        on_module: Called after every attention module whose W_O is refitted, and after every
            tensor that is written or compared.
        made_by: The command, for the record, if it was one.
        proof: What shows that the result is right.
        max_shard_size: Largest size of a file of weights, such as "5GB".

    Raises:
        HeadpruneError: If the input does not fit together, or the output cannot be written.
        ProofError: If the result does not compute what the gated original computes.
    """
    asked = PlanSource(gates, plan, scores, criterion, keep)
    refuse_source(asked, refit)
    loading = (dtype, trust_remote_code, assume_supported, drop_unexpected)
    on_stage("reading the headers")
    net, source = load(model, *loading, weights=False)
    constraints = constraints_of(net, layout, targets, tensor_parallel)
    chosen, evidence, weights = plan_from(net, source, asked, constraints)
    chosen, cuts, padding = laid_out(chosen, constraints)
    stored = result_dtypes(net, model, out_dtype)
    judged, changed = JudgedRefit(None, None), [*weights]
    whole: Callable[[], PreTrainedModel] = partial(_whole, model, loading, out_dtype, weights)
    if refit is not None or weights:
        _refuse_tensors(proof)
    if refit is not None:
        on_stage("loading the model")
        loaded = whole()
        on_stage("testing the verification")
        refuse_unprovable(loaded, chosen)
        on_stage("refitting W_O")
        config = calibration or CalibrationConfig()
        examples = calibration_of(loaded, model, refit, config, "--refit", trust_remote_code)
        judged = judged_refit(
            loaded,
            resolve(chosen, loaded, ragged=True),
            examples,
            refit.source,
            config.seed,
            on_module,
        )
        changed = _outputs(loaded)
        whole = [loaded].pop  # it is let go once it was probed
        del loaded
    done = Pruning(
        evidence=evidence,
        trained_weights=bool(weights),
        refit_left_out=None if judged.taken else judged.worth,
    )
    work = Changes(done, judged.taken, made_by)
    order = WriteOrder(source, model, chosen, output, stored, work, max_shard_size)
    how = Streaming(proof, on_stage, on_module)
    pruned = write_streamed(net, cuts, order, how, whole, changed)
    said = judged.warnings if refit is not None else _warnings(evidence, chosen)
    return replace(pruned, warnings=(*pruned.warnings, *said, *padding))


def _whole(
    model: str | Path,
    loading: tuple[Dtype, bool, bool, bool],
    out_dtype: Dtype,
    weights: dict[str, Tensor],
) -> PreTrainedModel:
    """The model with its weights, those that were trained among them."""
    net, _ = load(model, *loading)
    result_dtypes(net, model, out_dtype)  # refuses what cannot be written
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
            "--proof tensors compares the result with the checkpoint, and --refit and gates with "
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
    overwrite: bool = False,
    dtype: Dtype = Dtype.AUTO,
    out_dtype: Dtype = Dtype.AUTO,
    trust_remote_code: bool = False,
    assume_supported: bool = False,
    drop_unexpected: bool = False,
    on_stage: Stage = lambda stage: None,
    on_tensor: OnModule = lambda done, total: None,
    made_by: MadeBy | None = None,
    proof: ProofOption = ProofOption.AUTO,
    max_shard_size: str = SHARD,
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
        on_tensor: Called after every tensor that is written or compared.
        made_by: The command, for the record, if it was one.
        proof: What shows that the result is right.
        max_shard_size: Largest size of a file of weights, such as "5GB".

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
    on_stage("reading the headers")
    loading = (dtype, trust_remote_code, assume_supported, drop_unexpected)
    net, source = load(model, *loading, weights=False)
    stored = result_dtypes(net, model, out_dtype)
    chosen = plan_from_scores([], Unit.HEAD, [], 0, source, whole=attention_of(net))
    work = Changes(Migration(), made_by=made_by)
    order = WriteOrder(source, model, chosen, output, stored, work, max_shard_size)
    how = Streaming(proof, on_stage, on_tensor)
    whole = partial(_whole, model, loading, out_dtype, {})
    return write_streamed(net, resolve(chosen, net), order, how, whole)


@torch.no_grad()
def _load_weights(net: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    for name, value in weights.items():
        owner, _, last = name.rpartition(".")
        module = net.get_submodule(owner)
        with present(module):
            module.get_parameter(last).copy_(value)
