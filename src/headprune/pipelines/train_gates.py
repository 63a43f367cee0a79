"""headprune train-gates: gates on every head, trained to an exact count."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel

from headprune._version import __version__
from headprune.checkpoint.folders import check_output
from headprune.checkpoint.gates import GatesMetadata, write_gates
from headprune.config import DataConfig, Method, Objective, Train, TrainGatesConfig, write_yaml
from headprune.data.sources import refuse_missing_file
from headprune.errors import CheckpointError, HeadpruneError
from headprune.models.attention import attention_of, of_kinds, refuse_unknown_kinds
from headprune.models.gating import gated
from headprune.models.loading import load_tokenizer, task_of
from headprune.models.planning import (
    default_unit,
    head_budget,
    leaves_ragged,
    refuse_target,
    unit_sizes,
)
from headprune.models.refusals import refuse_without_text
from headprune.pipelines.prune import load
from headprune.runtime.modeling_headprune import Attention
from headprune.tensors.units import Unit
from headprune.training import processes
from headprune.training.batches import batches
from headprune.training.channels import Channels
from headprune.training.gates import Gates
from headprune.training.objectives import Distillation, Loss, labelled
from headprune.training.rounds import default_count, plan_rounds
from headprune.training.slim import (
    Interrupted,
    disk_errors,
    last_complete_checkpoint,
    stop_on_interrupt,
)
from headprune.training.sparsity import CheapestFirst, ConstantPenalty, HeadTarget, Sparsity
from headprune.training.trainer import (
    GateCallback,
    GatedModel,
    GateTrainer,
    StepRecord,
    freeze,
    training_arguments,
)


@dataclass(frozen=True)
class GatesRun:
    """A finished training.

    Attributes:
        output: The gates folder.
        metadata: What gates.json says.
        ragged: Whether a cut of these units leaves KV heads with unequal numbers of queries, as
            single heads of a grouped-query model do; ``prune`` then needs ``--shape ragged``.
    """

    output: Path
    metadata: GatesMetadata
    ragged: bool


def train_gates(
    model: str | Path,
    data: DataConfig,
    output: Path,
    config: TrainGatesConfig,
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    assume_supported: bool = False,
    drop_unexpected: bool = False,
    on_step: Callable[[StepRecord], None] = lambda record: None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> GatesRun:
    """Trains gates for a model and writes them to ``output``.

    Several processes share every batch (see ``training.processes``); one of them writes and tells.

    Args:
        model: Folder or hub id.
        data: Where the training text comes from.
        output: The gates folder (see ``checkpoint.gates``).
        config: How to train.
        resume: Go on from the last checkpoint in ``output``; the settings must be the same.
        overwrite: Start anew in an existing ``output``.
        trust_remote_code: Allow code that comes with the model.
        assume_supported: Go on where the config has settings that the family's row does not know.
        drop_unexpected: Go on without tensors of the checkpoint that the model's class does not
            take.
        on_step: Called after every optimiser step.
        on_stage: Called with a few words before every stage.

    Raises:
        HeadpruneError: If model, data and settings do not fit together.
        Interrupted: After Ctrl-C; a checkpoint has been written.
    """
    processes.share_of(config.batch_size)
    if not processes.is_main():
        on_stage = on_step = _say_nothing
    settings = {
        "model": str(model),
        "data": data.model_dump(mode="json"),
        "train_gates": config.model_dump(mode="json"),
    }
    processes.on_main(lambda: _check_output(output, settings, resume, overwrite))
    refuse_missing_file(data.source)
    refuse_unknown_kinds(config.attention)
    refuse_target(config.target_heads)
    on_stage("loading the model")
    frozen = config.train in (Train.GATES, Train.CHANNELS)
    net, source = load(
        model,
        config.dtype,
        trust_remote_code,
        assume_supported,
        drop_unexpected,
        keep_bfloat16=frozen
        and torch.cuda.is_available()
        and torch.cuda.is_bf16_supported(including_emulation=False),
    )
    refuse_without_text(net, "train-gates")
    attentions = of_kinds(attention_of(net), config.attention)
    unit = config.unit or default_unit(attentions)
    drawn = config.method is Method.L0
    gates = Gates(attentions, unit, config.init_log_alpha, config.temperature, drawn)
    sizes = unit_sizes(attentions, unit)
    sparsity = _sparsity(config, sizes, len(attentions))

    on_stage("reading the data")
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    objective = _objective(config.objective, net, data)
    if not drawn and objective is Objective.DISTILL:
        raise HeadpruneError(
            "--method cheapest weighs heads by the gradient of a loss, and that of the objective "
            "distill is zero where the model starts. Use --method l0."
        )
    rows, collate = batches(objective, net, tokenizer, data, config)
    loss: Loss = labelled
    if objective is Objective.DISTILL:
        loss = Distillation(None if frozen else copy.deepcopy(net).requires_grad_(False))
    freeze(net, attentions, config.train)
    channels = Channels(attentions) if config.train is Train.CHANNELS else None
    if config.gradient_checkpointing:
        # renamed in transformers 5.2x; the old name warns there and is the only one before
        enable = getattr(net, "activation_checkpointing_enable", net.gradient_checkpointing_enable)
        enable({"use_reentrant": False})

    steps = config.steps or math.ceil(config.epochs * len(rows) / config.batch_size)
    trainer = GateTrainer(
        config,
        sparsity,
        plan_rounds(steps, _round_count(config, sizes), _settle(config)),
        GatedModel(net, gates, loss, channels),
        args=training_arguments(config, output / "checkpoints", steps),
        train_dataset=rows,
        data_collator=collate,
    )
    if not resume:
        processes.on_main(lambda: _begin(output, settings))
    on_stage("training")
    with ExitStack() as stack:
        stack.enter_context(gated(attentions, gates.source))
        if channels is not None:
            stack.enter_context(channels.scaling(gates))
        stopped = stack.enter_context(stop_on_interrupt())
        callback = GateCallback(trainer, output / "history.jsonl", on_step, stopped.is_set)
        trainer.add_callback(callback)
        checkpoint = None
        if resume:
            checkpoint = processes.on_main(lambda: last_complete_checkpoint(output / "checkpoints"))
        with disk_errors(output):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if callback.interrupted:
        raise Interrupted(
            f"Stopped after step {trainer.state.global_step} of {steps}; a checkpoint is in "
            f"'{output}'. Go on with the same command and --resume."
        )
    metadata = processes.on_main(
        lambda: _finish(output, trainer, source, unit, objective, data, attentions)
    )
    return GatesRun(output, metadata, ragged=leaves_ragged(attentions, unit))


def _say_nothing(_: object) -> None:
    """What the processes beside the main one tell."""


def _check_output(output: Path, settings: dict[str, Any], resume: bool, overwrite: bool) -> None:
    path = output / "config.yaml"
    if resume and path.is_file():
        before = yaml.safe_load(path.read_text(encoding="utf-8"))
        changed = _changed(before, settings)
        if changed:
            raise CheckpointError(
                f"The run in '{output}' was started with other settings ({changed}). Resume it "
                "with the same ones, or start anew with --overwrite."
            )
        return
    if resume:
        raise CheckpointError(f"There is no run in '{output}' to resume; leave out --resume.")
    check_output(output, overwrite)


def _begin(output: Path, settings: dict[str, Any]) -> None:
    """Makes room for a run that nothing stands in the way of any more."""
    shutil.rmtree(output, ignore_errors=True)
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_yaml(settings, output / "config.yaml")
    except OSError as error:
        raise CheckpointError(f"Could not write '{output}': {error}.") from None


def _changed(before: dict[str, Any], now: dict[str, Any]) -> str:
    def flat(settings: dict[str, Any]) -> dict[str, Any]:
        nested = {f"{k}.{n}": v for k in ("data", "train_gates") for n, v in settings[k].items()}
        return {"model": settings["model"], **nested}

    old, new = flat(before), flat(now)
    return ", ".join(f"{k}: {old.get(k)} then, {new[k]} now" for k in new if old.get(k) != new[k])


def _sparsity(config: TrainGatesConfig, sizes: list[int], modules: int) -> Sparsity:
    if config.target_heads is not None:
        kind = HeadTarget if config.method is Method.L0 else CheapestFirst
        return kind(head_budget(config.target_heads, sizes), sizes, config.warmup)
    assert config.l0_penalty is not None
    return ConstantPenalty(config.l0_penalty, modules)


def _round_count(config: TrainGatesConfig, sizes: list[int]) -> int:
    # units of unequal size might not add up to the target any more after an earlier round
    if config.target_heads is None or config.method is Method.CHEAPEST or len(set(sizes)) > 1:
        return 1
    return config.rounds or default_count(1 - head_budget(config.target_heads, sizes) / sum(sizes))


def _settle(config: TrainGatesConfig) -> float:
    if config.settle is not None:
        return config.settle
    return 0.6 if config.method is Method.L0 else 0.3


def _objective(asked: Objective, net: PreTrainedModel, data: DataConfig) -> Objective:
    task = task_of(net)
    natural = {
        "causal-lm": Objective.LM,
        "seq2seq-lm": Objective.LM,
        "masked-lm": Objective.MLM,
        "classification": Objective.TASK if data.label_column else Objective.DISTILL,
        "features": Objective.DISTILL,
    }[task]
    if asked is Objective.AUTO:
        return natural
    if asked not in (natural, Objective.DISTILL):
        without = " without --label-column" if asked is Objective.TASK else ""
        raise HeadpruneError(
            f"--objective {asked.value} does not fit {type(net).__name__}{without}; use "
            f"{natural.value}" + ("." if natural is Objective.DISTILL else " or distill.")
        )
    return asked


def _finish(
    output: Path,
    trainer: GateTrainer,
    source: Any,
    unit: Unit,
    objective: Objective,
    data: DataConfig,
    attentions: list[Attention],
) -> GatesMetadata:
    gates, net = trainer.gates.cpu(), trainer.model.model
    if not gates.chosen:  # settle = 0: the choice falls after the last step
        gates.choose(trainer.sparsity.choice(gates, trainer.rounds[-1]))
    if trainer.model.channels is not None:
        for weight in trainer.model.channels.fold():
            weight.requires_grad_(True)  # it is a trained weight now
    weights = {
        name: parameter.detach().cpu().contiguous()
        for name, parameter in net.named_parameters()
        if parameter.requires_grad
    }
    metadata = GatesMetadata(
        headprune_version=__version__,
        model=source,
        unit=unit,
        method=trainer.gate_config.method,
        temperature=gates.temperature,
        modules=tuple(a.path for a in attentions),
        heads=tuple(tuple(a.query_ids) for a in attentions),
        group_sizes=tuple(tuple(a.group_sizes) for a in attentions),
        query_heads=int(gates.sizes.sum()),
        kept_heads=int((gates.sizes * gates.kept).sum()),
        steps=trainer.state.global_step,
        objective=objective.value,
        data=data.source,
        final_loss=trainer.last_loss,
        trained_weights=bool(weights),
    )
    tensors = {
        "log_alpha": gates.log_alpha.detach(),
        "value": gates.values().detach(),
        "kept": gates.kept,
    }
    write_gates(output, metadata, tensors, weights or None)
    shutil.rmtree(output / "checkpoints", ignore_errors=True)
    return metadata
