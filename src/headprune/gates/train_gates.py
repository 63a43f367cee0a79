"""headprune train-gates: gates on every head, trained to an exact count."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import devices, processes
from headprune._version import __version__
from headprune.config import (
    MOST_STEPS,
    CalibrationConfig,
    DataConfig,
    Dtype,
    Method,
    Objective,
    Resuming,
    Train,
    TrainGatesConfig,
)
from headprune.context import Context
from headprune.data.batches import batches, calibration
from headprune.data.read import refuse_missing_file
from headprune.data.text import Sequences
from headprune.errors import DataError, HeadpruneError
from headprune.gates.gates import Gates
from headprune.gates.objectives import Distillation, Loss, labelled
from headprune.gates.refitted import (
    can_refit,
    choose_and_refit,
    original_of,
    output_weights,
)
from headprune.gates.sparsity import ConstantPenalty, HeadTarget, Sparsity
from headprune.gates.trainer import (
    GateCallback,
    GatedModel,
    GateTrainer,
    freeze,
)
from headprune.io.outputs import whole_folder
from headprune.model.attention import attention_of, of_kinds, refuse_unknown_kinds
from headprune.model.batch import most_tokens
from headprune.model.embedding import head_of
from headprune.model.gating import gated
from headprune.model.loading import CLASSIFIERS, load_tokenizer, task_of
from headprune.model.losses import OWN_SHARE, recompute_activations
from headprune.model.open import load
from headprune.model.placement import refuse_to_shard
from headprune.model.refusals import refuse_without_text
from headprune.model.units import (
    default_unit,
    head_budget,
    leaves_ragged,
    refuse_target,
    unit_sizes,
)
from headprune.placements import in_shards
from headprune.resuming import CONFIG, Run, claimed_run
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.gates import GatesMetadata, write_gates
from headprune.training import stop_on_interrupt, train, training_arguments


@dataclass(frozen=True)
class GatesRun:
    """A finished training.

    Attributes:
        output: The gates folder.
        metadata: What gates.json says.
        ragged: Whether a cut of these units leaves KV heads with unequal numbers of queries, as
            single heads of a grouped-query model do; ``prune`` then needs ``--layout ragged``.
    """

    output: Path
    metadata: GatesMetadata
    ragged: bool


def train_gates(
    model: str | Path,
    data: DataConfig,
    output: Path,
    config: TrainGatesConfig,
    rerun: Resuming = Resuming(),
    context: Context = Context(),
) -> GatesRun:
    """Trains gates for a model and writes them to ``output``.

    Several processes share every batch (see ``training.processes``); one of them writes and tells.

    Until the end all that is written lies beside ``output``, in a folder of its name with
    ``-checkpoints``.

    Args:
        model: Folder or hub id.
        data: Where the training text comes from.
        output: The gates folder (see ``schemas.gates``).
        config: How to train.
        rerun: What becomes of what an earlier run left.
        context: What it runs in.

    Raises:
        HeadpruneError: If model, data and settings do not fit together.
        Interrupted: After Ctrl-C; a checkpoint has been written.
        TrainingError: If training came to numbers that are not finite.
    """
    processes.share_of(config.batch_size)
    if in_shards():
        _refuse_to_shard(config)
    if not processes.is_main():
        context = context.unheard()
    run = Run.of(output, "train_gates", config, model=model, data=data)
    with claimed_run(output, run, [model, data], rerun):
        refuse_missing_file(data.source)
        refuse_unknown_kinds(config.attention)
        refuse_target(config.target_heads)
        context.stage("loading the model")
        kept = config.train is Train.GATES and devices.computes_bfloat16()
        net, source = load(model, config.dtype, context.allowed, keep_bfloat16=kept)
        refuse_without_text(net, "train-gates")
        attentions = of_kinds(attention_of(net), config.attention)
        unit = config.unit or default_unit(attentions)
        sizes = unit_sizes(attentions, unit)

        context.stage("reading the data")
        remote = context.allowed.trust_remote_code
        tokenizer = load_tokenizer(model, trust_remote_code=remote)
        examples = _calibration(net, model, data, config, tokenizer, remote)
        config = config.model_copy(update={"method": _method(config, net, examples)})
        gates = Gates(attentions, unit, config.init_log_alpha, config.temperature)
        gates.to(devices.chosen())  # Trainer moves no model that is in shards
        sparsity = _sparsity(config, sizes, len(attentions))
        objective = _objective(config, net, data)
        rows, collate, _ = batches(objective, net, tokenizer, data, config, running=True)
        steps = _steps(config, len(rows))
        loss = _loss(objective, net, config)
        freeze(net, attentions, config.train)
        if config.gradient_checkpointing:
            recompute_activations(net)
        if not rerun.resume:
            processes.on_main(run.begin)
        refitted = output_weights(attention_of(net)) if config.method is Method.REFIT else ()
        trainer = GateTrainer(
            config,
            sparsity,
            _choosing(config, steps),
            GatedModel(net, gates, loss, refitted),
            remedies=_remedies(config, objective),
            args=training_arguments(
                run, steps, config.batch_size, config.seed, config.save_every, max_grad_norm=1.0
            ),
            train_dataset=rows,
            data_collator=collate,
        )
        if config.method is Method.REFIT and not (rerun.resume and processes.on_main(run.newest)):
            assert examples is not None
            _announce(context, examples.tokens, config, steps)
            choose_and_refit(net, attentions, gates, sparsity.heads, examples, context)
        context.stage("training")
        with gated(attentions, gates.source), stop_on_interrupt() as stopped:
            callback = GateCallback(trainer, context.step, stopped.is_set)
            again = "Continue with the same command and --resume."
            train(trainer, run, callback, rerun.resume, again)
        about = {"model": source, "unit": unit, "objective": objective.value, "data": data.source}
        metadata = processes.on_main(lambda: _finish(output, run, trainer, attentions, about))
        return GatesRun(output, metadata, ragged=leaves_ragged(attentions, unit))


def _announce(context: Context, tokens: int, config: TrainGatesConfig, steps: int) -> None:
    """Say what comes before the first step: about five passes over the text.

    A step passes forward, backward and through the original: four passes over its batch.
    """
    worth = math.ceil(5 * tokens / (4 * config.batch_size * config.seq_len))
    context.line(
        f"First heads are chosen and W_O is refitted on {tokens:,} tokens, which takes about as "
        f"long as {worth:,} steps of training; {steps:,} follow. --method l0 goes without."
    )


def _calibration(
    net: PreTrainedModel,
    model: str | Path,
    data: DataConfig,
    config: TrainGatesConfig,
    tokenizer: Any,
    trust_remote_code: bool,
) -> Sequences | None:
    """What heads are chosen on before any step, where that is asked for or might be best."""
    might = config.leaves_method and task_of(net) == "causal-lm" and not in_shards()
    if config.method is not Method.REFIT and not might:
        return None
    usual = CalibrationConfig()
    length = min(usual.seq_len, most_tokens(net.config, tokenizer) or usual.seq_len)
    sizes = CalibrationConfig(seq_len=length, seed=config.seed)
    try:
        return calibration(net, tokenizer, data, sizes, "train-gates").fit
    except DataError as error:
        if config.method is Method.REFIT:
            raise DataError(f"{error} Or use --method l0.") from None
        return None  # too short for it, and maybe not for shorter sequences


def _method(config: TrainGatesConfig, net: PreTrainedModel, examples: Sequences | None) -> Method:
    if config.method is not Method.AUTO:
        return config.method
    return Method.REFIT if examples is not None and can_refit(net, examples) else Method.L0


def _loss(objective: Objective, net: PreTrainedModel, config: TrainGatesConfig) -> Loss:
    """The loss of an objective; a teacher is the model as it is now."""
    if objective not in (Objective.DISTILL, Objective.LM_DISTILL):
        return labelled
    refitting = config.method is Method.REFIT
    changed = {
        Train.ATTENTION: net.parameters(),
        Train.ALL: net.parameters(),
        Train.GATES: output_weights(attention_of(net)) if refitting else (),
    }[config.train]
    own = OWN_SHARE if objective is Objective.LM_DISTILL else 0.0
    whole = config.dtype is Dtype.AUTO and net.dtype is torch.float32
    bf16 = refitting and whole and devices.computes_bfloat16()
    return Distillation(head_of(net), original_of(net, changed), own, bf16)


def _refuse_to_shard(config: TrainGatesConfig) -> None:
    """Refuses what cannot be split over processes.

    Raises:
        HeadpruneError: Saying why, and what to do instead.
    """
    refuse_to_shard()
    if config.method is Method.REFIT:
        raise HeadpruneError(
            "--method refit changes output projections, and --shard leaves weights as they are. "
            "Use --method l0, or leave out --shard."
        )
    if config.train is not Train.GATES:
        raise HeadpruneError(
            f"--shard leaves weights as they are, and --train {config.train.value} changes them. "
            "Use --train gates, or leave out --shard."
        )


def _steps(config: TrainGatesConfig, rows: int) -> int:
    """Optimiser steps: those that are asked for, or as many as the epochs take."""
    steps = config.steps or math.ceil(config.epochs * rows / config.batch_size)
    if steps > MOST_STEPS:
        raise HeadpruneError(
            f"epochs {config.epochs:g} of {rows:,} rows are {steps:,} steps, and no more than "
            f"{MOST_STEPS:,} are made. Give fewer, or --steps."
        )
    return steps


def _remedies(config: TrainGatesConfig, objective: Objective) -> tuple[str, str]:
    """What to change where the loss, a gate or a weight is not finite."""
    half = config.dtype in (Dtype.FLOAT16, Dtype.BFLOAT16)
    precision = "compute with --config dtype=float32, " if half else ""
    hidden = "give text with tokens to mask, " if objective is Objective.MLM else ""
    rates = ["scale_lr"] if config.method is not Method.L0 else ["gate_lr", "scale_lr"]
    rates += ["weight_lr"] if config.train is not Train.GATES else []
    return (
        f"Nothing was trained yet: {precision}{hidden}or look at the model with "
        "'headprune evaluate'.",
        f"Lower {' or '.join(rates)}, {precision}{hidden}and start anew with --overwrite.",
    )


def _sparsity(config: TrainGatesConfig, sizes: list[int], modules: int) -> Sparsity:
    if config.target_heads is not None:
        return HeadTarget(head_budget(config.target_heads, sizes), sizes, config.sparsity_warmup)
    assert config.l0_penalty is not None
    return ConstantPenalty(config.l0_penalty, modules)


def _choosing(config: TrainGatesConfig, steps: int) -> int:
    """Steps after which the heads are chosen; none where that comes before the first."""
    if config.method is Method.REFIT:
        return 0
    return round(steps * (1 - config.finetune_fraction))


def _objective(config: TrainGatesConfig, net: PreTrainedModel, data: DataConfig) -> Objective:
    task, asked = task_of(net), config.objective
    natural = {
        "causal-lm": Objective.LM,
        "seq2seq-lm": Objective.LM,
        "masked-lm": Objective.MLM,
        **dict.fromkeys(CLASSIFIERS, Objective.TASK if data.label_column else Objective.DISTILL),
    }.get(task, Objective.DISTILL)
    others = [Objective.DISTILL, *([Objective.LM_DISTILL] if natural is Objective.LM else [])]
    if asked is Objective.AUTO:
        both = config.method is Method.REFIT and natural is Objective.LM
        return Objective.LM_DISTILL if both else natural
    if asked not in (natural, *others):
        without = " without --label-column" if asked is Objective.TASK else ""
        listed = " or ".join(dict.fromkeys(each.value for each in (natural, *others)))
        raise HeadpruneError(
            f"objective {asked.value} does not fit {type(net).__name__}{without}; use {listed}."
        )
    return asked


def _finish(
    output: Path,
    run: Run,
    trainer: GateTrainer,
    attentions: list[Attention],
    about: dict[str, Any],
) -> GatesMetadata:
    gates, net = trainer.gates.cpu(), trainer.model.model
    for weight in trainer.model.refitted:
        weight.requires_grad_(True)
    weights = {
        name: parameter.detach().cpu().contiguous()
        for name, parameter in net.named_parameters()
        if parameter.requires_grad
    }
    metadata = GatesMetadata(
        headprune_version=__version__,
        **about,
        method=trainer.gate_config.method,
        temperature=gates.temperature,
        modules=tuple(a.path for a in attentions),
        heads=tuple(tuple(a.query_ids) for a in attentions),
        group_sizes=tuple(tuple(a.group_sizes) for a in attentions),
        query_heads=int(gates.sizes.sum()),
        kept_heads=int((gates.sizes * gates.kept).sum()),
        steps=trainer.state.global_step,
        final_loss=trainer.last_loss,
        trained_weights=bool(weights),
        seed=trainer.gate_config.seed,
    )
    tensors = {
        "log_alpha": gates.log_alpha.detach(),
        "value": gates.values().detach(),
        "kept": gates.kept,
    }
    with whole_folder(output) as folder:
        metadata = write_gates(folder, metadata, tensors, weights or None)
        shutil.copyfile(run.folder / CONFIG, folder / CONFIG)
        trainer.write_history(folder)
    run.remove()
    return metadata
