"""headprune train-gates: gates on every head, trained to an exact count."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
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
from headprune.data.text import Sequences
from headprune.errors import DataError, HeadpruneError
from headprune.evidence.score import words_of
from headprune.gates.gates import Gates
from headprune.gates.objectives import Distillation, Loss, labelled
from headprune.gates.refitted import can_refit, choose_and_refit, original_of, output_weights
from headprune.gates.sparsity import ConstantPenalty, HeadTarget, Sparsity
from headprune.gates.trainer import GateCallback, GatedModel, GateTrainer, freeze
from headprune.io.outputs import whole_folder
from headprune.model.attention import of_kinds, refuse_unknown_kinds
from headprune.model.batch import modality_of, most_tokens
from headprune.model.embedding import head_of
from headprune.model.gating import gated
from headprune.model.loading import CLASSIFIERS
from headprune.model.losses import OWN_SHARE, recompute_activations
from headprune.model.open import Model, open_model
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
from headprune.training import (
    refuse_missing_reporter,
    stop_on_interrupt,
    train,
    training_arguments,
)

_AGAIN = "Continue with the same command and --resume."


@dataclass(frozen=True)
class GatesRun:
    """A finished training.

    Attributes:
        output: The gates folder.
        metadata: The content of gates.json.
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
    refuse: Callable[[Model, Context], object] = lambda model, context: None,
) -> GatesRun:
    """Train gates for a model and write them to ``output``.

    Several processes share every batch (see ``processes``). Until the end, checkpoints lie beside
    ``output`` (see ``training``).

    Args:
        model: Folder or hub id.
        data: Training text.
        output: The gates folder (see ``schemas.gates``).
        config: Settings of the training.
        rerun: Whether an output is replaced, or a run resumed.
        context: Progress and permissions.
        refuse: Called with the opened model, before the long work.

    Raises:
        HeadpruneError: If model, data and settings do not fit together.
        Interrupted: After Ctrl-C; a checkpoint has been written.
        TrainingError: If a number is not finite.
    """
    processes.share_of(config.batch_size)
    if in_shards():
        _refuse_to_shard(config)
    if not processes.is_main():
        context = context.without_progress()
    run = Run.of(output, "train_gates", config, model=model, data=data)
    with claimed_run(output, run, [model, data], rerun):
        refuse_missing_reporter(config.report_to)
        refuse_unknown_kinds(config.attention)
        refuse_target(config.target_heads)
        context.stage("loading the model")
        frozen = config.train is Train.GATES
        opened = open_model(model, config.dtype, context.allowed, calibrates=frozen)
        refuse(opened, context)
        net, source = opened.net, opened.identity  # the fingerprint, before weights change
        refuse_without_text(net, "train-gates")
        attentions = of_kinds(opened.attentions, config.attention)
        unit = config.unit or default_unit(attentions)
        config = config.model_copy(update={"unit": unit})
        trainer = _trained(run, opened, attentions, data, config, rerun.resume, context)
        about = {"model": source, "unit": unit, "data": data.source}
        metadata = processes.on_main(lambda: _finish(output, run, trainer, attentions, about))
        return GatesRun(output, metadata, ragged=leaves_ragged(attentions, unit))


def _trained(
    run: Run,
    model: Model,
    attentions: list[Attention],
    data: DataConfig,
    config: TrainGatesConfig,
    resume: bool,
    context: Context,
) -> GateTrainer:
    """Train the gates; the trainer holds them."""
    context.stage("reading the data")
    net, unit = model.net, config.unit
    assert unit is not None
    examples = _calibration(model, data, config)
    if config.method is Method.AUTO:
        fit = examples is not None and can_refit(net, examples)
        config = config.model_copy(update={"method": Method.REFIT if fit else Method.L0})
    config = config.model_copy(update={"objective": _objective(config, model, data)})
    refitting = config.method is Method.REFIT
    gates = Gates(attentions, unit, config.init_log_alpha, config.temperature)
    gates.to(devices.chosen())  # Trainer moves no model that is in shards
    sparsity = _sparsity(config, unit_sizes(attentions, unit), len(attentions))
    text = batches(config.objective, net, model.tokenizer, data, config, running=True)
    steps = _steps(config, len(text.rows))
    refitted = output_weights(model.attentions) if refitting else []
    loss = _loss(net, config, refitted)
    freeze(net, attentions, config.train)
    if config.gradient_checkpointing:
        recompute_activations(net)
    if not resume:
        processes.on_main(run.begin)
    trainer = GateTrainer(
        config,
        sparsity,
        0 if refitting else round(steps * (1 - config.finetune_fraction)),
        GatedModel(net, gates, loss, refitted),
        remedies=_remedies(config),
        args=training_arguments(
            run, steps, config.batch_size, config.seed, config.save_every, max_grad_norm=1.0
        ),
        train_dataset=text.rows,
        data_collator=text.collate,
    )
    if refitting and not (resume and processes.on_main(run.newest)):
        assert examples is not None
        _announce(context, examples.tokens, config, steps)
        words = words_of(model, data)
        choose_and_refit(net, attentions, gates, sparsity.heads, examples, words, context)
    context.stage("training")
    with gated(attentions, gates.source), stop_on_interrupt() as stopped:
        callback = GateCallback(trainer, context.step, stopped.is_set)
        train(trainer, run, callback, config.report_to, resume, _AGAIN)
    return trainer


def _announce(context: Context, tokens: int, config: TrainGatesConfig, steps: int) -> None:
    """Say how long the refit takes: about five passes over the text.

    A step passes forward, backward and through the original: four passes over its batch.
    """
    worth = math.ceil(5 * tokens / (4 * config.batch_size * config.seq_len))
    context.line(
        f"First heads are chosen and W_O is refitted on {tokens:,} tokens, which takes about as "
        f"long as {worth:,} steps of training; {steps:,} follow. --method l0 goes without."
    )


def _calibration(model: Model, data: DataConfig, config: TrainGatesConfig) -> Sequences | None:
    """Return text to choose heads on before any step, where the method is or may be refit."""
    may = config.leaves_method and model.task == "causal-lm" and not in_shards()
    if config.method is not Method.REFIT and not may:
        return None
    usual, tokenizer = CalibrationConfig().seq_len, model.tokenizer
    length = min(usual, most_tokens(model.any_net, tokenizer) or usual)
    sizes = CalibrationConfig(seq_len=length, seed=config.seed)
    try:
        return calibration(model.net, tokenizer, data, sizes, "train-gates").fit
    except DataError as error:
        if config.method is Method.REFIT:
            raise DataError(f"{error} Or use --method l0.") from None
        return None  # too short for it, and maybe not for shorter sequences


def _loss(net: PreTrainedModel, config: TrainGatesConfig, refitted: Sequence[nn.Parameter]) -> Loss:
    """Return the loss; a teacher is the model as it is now."""
    if config.objective not in (Objective.DISTILL, Objective.LM_DISTILL):
        return labelled
    changed = refitted if config.train is Train.GATES else net.parameters()
    own = OWN_SHARE if config.objective is Objective.LM_DISTILL else 0.0
    in_float32 = config.dtype is Dtype.AUTO and net.dtype is torch.float32
    bf16 = config.method is Method.REFIT and in_float32 and devices.computes_bfloat16()
    return Distillation(head_of(net), original_of(net, changed), own, bf16)


def _refuse_to_shard(config: TrainGatesConfig) -> None:
    """Refuse what changes weights, which cannot be split over processes.

    Raises:
        HeadpruneError: With the reason, and another way.
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
    steps = config.steps or math.ceil(config.epochs * rows / config.batch_size)
    if steps > MOST_STEPS:
        raise HeadpruneError(
            f"epochs {config.epochs:g} of {rows:,} rows are {steps:,} steps, and no more than "
            f"{MOST_STEPS:,} are made. Give fewer, or --steps."
        )
    return steps


def _remedies(config: TrainGatesConfig) -> tuple[str, str]:
    """Return advice where a number is not finite: before, and after training."""
    half = config.dtype in (Dtype.FLOAT16, Dtype.BFLOAT16)
    precision = "compute with --config dtype=float32, " if half else ""
    hidden = "give text with tokens to mask, " if config.objective is Objective.MLM else ""
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


def _objective(config: TrainGatesConfig, model: Model, data: DataConfig) -> Objective:
    wanted = config.objective
    of_task = {"causal-lm": Objective.LM, "seq2seq-lm": Objective.LM, "masked-lm": Objective.MLM}
    natural = of_task.get(model.task, Objective.DISTILL)
    labelled = data.label_column or modality_of(model.net) == "sound"
    if model.task == "ctc" or (labelled and model.task in (*CLASSIFIERS, "token-classification")):
        natural = Objective.TASK
    possible = [natural, Objective.DISTILL]
    possible += [Objective.LM_DISTILL] if natural is Objective.LM else []
    if wanted is Objective.AUTO:
        both = config.method is Method.REFIT and natural is Objective.LM
        return Objective.LM_DISTILL if both else natural
    if wanted not in possible:
        without = " without --label-column" if wanted is Objective.TASK else ""
        listed = " or ".join(dict.fromkeys(each.value for each in possible))
        raise HeadpruneError(
            f"objective {wanted.value} does not fit {type(model.net).__name__}{without}; use "
            f"{listed}."
        )
    return wanted


def _finish(
    output: Path,
    run: Run,
    trainer: GateTrainer,
    attentions: list[Attention],
    about: dict[str, Any],
) -> GatesMetadata:
    """Write the gates folder, and remove the checkpoints."""
    gates, config, module = trainer.gates.cpu(), trainer.config, trainer.model
    refitted = set(map(id, module.refitted))
    weights = {
        name: weight.detach().cpu().contiguous()
        for name, weight in module.model.named_parameters()
        if weight.requires_grad or id(weight) in refitted
    }
    metadata = GatesMetadata(
        headprune_version=__version__,
        **about,
        method=config.method,
        objective=config.objective.value,
        temperature=gates.temperature,
        modules=tuple(a.path for a in attentions),
        heads=tuple(tuple(a.query_ids) for a in attentions),
        group_sizes=tuple(tuple(a.group_sizes) for a in attentions),
        query_heads=int(gates.sizes.sum()),
        kept_heads=int((gates.sizes * gates.kept).sum()),
        steps=trainer.state.global_step,
        final_loss=trainer.last_loss,
        trained_weights=bool(weights),
        seed=config.seed,
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
