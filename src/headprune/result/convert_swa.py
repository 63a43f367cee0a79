"""headprune convert-swa: a window for the KV heads that need no more, proven."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from headprune.config import DataConfig, Dtype, LayoutOption, SwaConfig, Writing
from headprune.context import Context
from headprune.errors import CheckpointError
from headprune.evidence.windows import refuse_context, window_of, window_scores
from headprune.io.outputs import claims_output
from headprune.model.batch import most_tokens
from headprune.model.open import Model, open_model
from headprune.model.units import refuse_target
from headprune.planning.constraints import constraints_of
from headprune.planning.windows import plan_windows, windows_of_gates
from headprune.proof.twins import refuse_unproven
from headprune.result.write import Changes, Proposal, Pruned, write
from headprune.schemas.plan import Plan
from headprune.schemas.records import Evidence, Windowing
from headprune.schemas.scores import Scores, read_scores
from headprune.surgery.edit import Edit

_NONE_FULL = (
    "No KV head keeps the whole past: what lies further back than the window is lost to all of "
    "them."
)


@claims_output("model", "data", "scores")
def convert_swa(
    model: str | Path,
    output: Path,
    config: SwaConfig,
    data: DataConfig | None = None,
    scores: Path | None = None,
    overwrite: bool = False,
    context: Context = Context(),
) -> Pruned:
    """Give KV heads a window (sliding window attention) and write the result, proven.

    The weights stay as they are, in another order of heads. A head with a window sees the latest
    tokens and the first ones, its sinks; its cache holds no others.

    Args:
        model: Folder or hub id.
        output: Folder to write; it appears whole or not at all.
        config: The window, and how many KV heads keep the whole past.
        data: Text that chooses the heads; None for that which comes with headprune.
        scores: Instead, a scores folder of ``score --form window``.
        overwrite: Replace an existing output.
        context: Progress and permissions.

    Raises:
        HeadpruneError: If the input does not fit together, or the output cannot be written.
        ProofError: If the result does not compute as the original with a mask per head.
    """
    context.stage("reading the headers")
    opened = open_model(
        model, config.dtype, context.allowed, calibrates=scores is None, packed=True
    )
    if opened.packed and scores is None:
        raise CheckpointError(
            f"'{model}' is quantised, and cannot be measured. Its layers take windows by --scores "
            "of the model that it was made from (score --form window --unit layer --sinks 0)."
        )
    if opened.packed and (config.dtype, config.out_dtype) != (Dtype.AUTO, Dtype.AUTO):
        raise CheckpointError(
            f"'{model}' is quantised, and its element types stay: leave out dtype and out_dtype."
        )
    if not opened.packed:
        refuse_unproven(opened, context)
    # scores of a quantised model are those of the one that it was made from
    identity = None if opened.packed else opened.identity
    chosen = None if scores is None else read_scores(scores, identity)
    proposal = propose_windows(opened, config, data, chosen, context)
    return _written(opened, output, proposal, config, context)


@claims_output("model", "gates")
def convert_swa_by_gates(
    model: str | Path,
    output: Path,
    gates: Path,
    config: SwaConfig,
    overwrite: bool = False,
    context: Context = Context(),
) -> Pruned:
    """Give the KV heads with closed gates a window; as ``convert_swa``.

    Args:
        model: Folder or hub id.
        output: Folder to write.
        gates: Folder of ``train-gates --form window``.
        config: Its element types; gates bring the rest.
        overwrite: Replace an existing output.
        context: Progress and permissions.
    """
    context.stage("reading the headers")
    opened = open_model(model, config.dtype, context.allowed)
    refuse_unproven(opened, context)
    plan, trained = windows_of_gates(opened, gates)
    evidence = Evidence(kind="gates", id=trained.id, seed=trained.metadata.seed)
    proposal = _proposal(opened, plan, evidence, trained.metadata.modules, config)
    return _written(opened, output, proposal, config, context)


def _written(
    model: Model, output: Path, proposal: Proposal, config: SwaConfig, context: Context
) -> Pruned:
    writing = Writing(out_dtype=config.out_dtype)
    pruned = write(model, proposal.edit, output, proposal.changes, writing, context)
    return replace(pruned, warnings=(*pruned.warnings, *proposal.warnings))


def propose_windows(
    model: Model,
    config: SwaConfig,
    data: DataConfig | None,
    scores: Scores | None,
    context: Context,
) -> Proposal:
    """Choose the KV heads of an opened model that get a window; arguments as of ``convert_swa``.

    Raises:
        HeadpruneError: If the input does not fit together.
    """
    refuse_target(config.keep_full)
    refuse_context(config.context_tokens, most_tokens(model.any_net, model.tokenizer))
    if config.targets:
        held = constraints_of(model.any_net, LayoutOption.PER_LAYER, config.targets)
        window = scores.metadata.window if scores is not None else None
        window = window or window_of(model.any_net, model.tokenizer, config.scoring)
        held.refuse_windows(window.size)
    if scores is None:
        scores = window_scores(model, config.scoring, data, context)
    element = model.result_dtypes(config.out_dtype).default
    budget = config.kept, config.max_kv_bytes, config.context_tokens
    plan = plan_windows(model, scores, *budget, element)
    criterion, _ = scores.of(None)
    seed = scores.metadata.calibration.seed
    evidence = Evidence(
        kind="scores", id=scores.id, criterion=criterion, keep=config.kept, seed=seed
    )
    return _proposal(model, plan, evidence, scores.metadata.modules, config)


def _proposal(
    model: Model, plan: Plan, evidence: Evidence, modules: Collection[str], config: SwaConfig
) -> Proposal:
    assert plan.window is not None
    if config.targets:
        held = constraints_of(model.any_net, LayoutOption.PER_LAYER, config.targets)
        held.check(Edit(plan).cuts(model.any_net))
    heads = sum(len(part.window or ()) for part in plan.attentions.values())
    done = Windowing(evidence=evidence, window=plan.window, heads=heads)
    every = sum(a.kv_heads for a in model.attentions if a.path in modules)
    return Proposal(Edit(plan), Changes(done), (_NONE_FULL,) if heads == every else ())
