"""headprune heal: a smaller model is trained to match the one it came from."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headprune import devices, processes
from headprune.config import DataConfig, HealConfig, HealObjective, HealTrain, Resuming, Writing
from headprune.context import Context
from headprune.data.read import digest_of_data
from headprune.distillation.optimizer import resolved
from headprune.distillation.pair import Pair, read_pair
from headprune.distillation.shards import probed, refuse_sharded, stored_weights
from headprune.distillation.trainer import HealedModel, HealTrainer, merged, trainable
from headprune.errors import CheckpointError, HeadpruneError
from headprune.io.outputs import claimed, place_of
from headprune.io.shell import command
from headprune.io.writing import beside
from headprune.model.cost import KVCache
from headprune.model.losses import own_share, recompute_activations
from headprune.model.precision import to_float32
from headprune.model.stored import id_of_model
from headprune.packages import refuse_missing
from headprune.placements import Placement, in_shards, placing, sharding
from headprune.result.folder import ModelFolder
from headprune.result.write import Changes, Pruned, write
from headprune.resuming import CONFIG, Run, claimed_run
from headprune.schemas.records import Healing
from headprune.surgery.sink_logits import (
    IN_ONE_KERNEL,
    no_sink_logits,
    sink_logits,
    with_sink_logits,
)
from headprune.training import (
    HistoryCallback,
    refuse_missing_reporter,
    stop_on_interrupt,
    train,
    training_arguments,
)

_FIT_ROWS = 4  # sequences that sink logits begin with
_NO_BETTER = (
    "Healing did not lower the loss on text that it was not trained on: the result has the weights "
    "that it began with. Try more text, or a lower --learning-rate."
)


@dataclass(frozen=True)
class Healed(ModelFolder):
    """A finished healing.

    Attributes:
        pruned: The result, as of every command that writes a model.
        before: Loss before, on text that chose nothing: the divergence from the teacher, blended
            with the model's own loss if training includes it.
        after: The same of the result.
        own_share: Weight of the model's own loss.
        steps: Optimiser steps.
        taken_after: Step of the weights in the result; 0 for the initial ones.
        sink_logits: Query heads that got a sink logit.
    """

    pruned: Pruned
    before: float
    after: float
    own_share: float
    steps: int
    taken_after: int
    sink_logits: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the record for ``--json``."""
        return {
            "steps": self.steps,
            "taken_after": self.taken_after,
            "loss": {"before": self.before, "after": self.after, "own_share": self.own_share},
            "sink_logits": self.sink_logits,
            "manifest": self.pruned.manifest.model_dump(mode="json"),
        }


def heal(
    model: str | Path,
    teacher: str | Path,
    data: DataConfig,
    output: Path,
    config: HealConfig,
    rerun: Resuming = Resuming(),
    context: Context = Context(),
) -> Healed:
    """Train a cut or converted model to match its teacher, and write it, proven.

    Held-out text chooses among the checkpoints; the initial weights stay if none is better.
    Reported numbers are of other held-out text. Several processes share every batch (see
    ``processes``). Until the end, checkpoints lie beside ``output`` (see ``training``).

    Args:
        model: The model to heal: folder or hub id.
        teacher: The model to match: folder or hub id.
        data: Plain text; labels are not used.
        output: Folder to write; it appears whole or not at all.
        config: Settings of the training.
        rerun: Whether an output is replaced, or a run resumed.
        context: Progress and permissions.

    Raises:
        HeadpruneError: If models and data do not fit together, or the output cannot be written.
        Interrupted: After Ctrl-C; a checkpoint has been written.
        ProofError: If the folder does not compute as the healed model.
        TrainingError: If a number is not finite.
    """
    config = _checked(config)
    resumed = rerun.model_copy(update={"resume": True})
    again = _resume_command(model, teacher, data, output, config, resumed, context)
    if not processes.is_main():
        context = context.without_progress()
    inputs: dict[str, Any] = {"model": model, "teacher": teacher, "data": data}
    run = Run.of(output, "heal", config, **inputs, data_sha256=digest_of_data(data))
    held_whole = nullcontext() if in_shards() else placing(Placement.WHOLE)
    with claimed_run(output, run, [model, teacher, data], rerun), held_whole:
        pair = read_pair(model, teacher, data, config, context)
        _refuse_no_logits(pair, config)
        config = config.model_copy(update={"objective": _objective(config, pair.model.task)})
        if not rerun.resume:
            processes.on_main(run.begin)
        trainer, about = _trained(run, pair, config, rerun.resume, again, context)
        return _written(run, pair, config, trainer, about, output, context)


def make_and_heal(
    make: Callable[[Path], tuple[str, ...]],
    teacher: str | Path,
    data: DataConfig,
    output: Path,
    config: HealConfig,
    overwrite: bool,
    context: Context,
) -> Healed:
    """Heal what ``make`` writes into the folder that it is given; that stays if healing fails.

    ``make`` returns warnings, which the result has as well.

    Raises:
        HeadpruneError: As by ``make``, and as by ``heal``; or if an earlier run left that folder.
    """
    _checked(config)
    inputs = [place_of(teacher), place_of(data)]
    with placing(Placement.WHOLE), claimed(output, overwrite, inputs):
        unhealed, rerun = beside(output, "{}-unhealed"), Resuming(overwrite=overwrite)
        if unhealed.exists() and not overwrite:
            begun = (Run.of(output, "heal", config).folder / CONFIG).exists()
            rerun = Resuming(resume=begun)
            again = _resume_command(unhealed, teacher, data, output, config, rerun, context)
            raise CheckpointError(
                f"'{unhealed}' is of an earlier run, whose healing did not end. Start anew with "
                f"--overwrite. {again}"
            )
        warnings = make(unhealed)
        healed = heal(unhealed, teacher, data, output, config, rerun, context)
        shutil.rmtree(unhealed, ignore_errors=True)
        warnings = tuple(dict.fromkeys((*warnings, *healed.pruned.warnings)))
        return replace(healed, pruned=replace(healed.pruned, warnings=warnings))


def _checked(config: HealConfig) -> HealConfig:
    """Refuse what shows before a model is opened, and return the settings for this device.

    Raises:
        HeadpruneError: With the reason.
    """
    processes.share_of(config.batch_size or processes.count())
    if in_shards():
        refuse_sharded(config)
    refuse_missing_reporter(config.report_to)
    if config.train is HealTrain.LORA:
        refuse_missing("--train lora", "peft")
    return resolved(config)


def _objective(config: HealConfig, task: str) -> HealObjective:
    """Return the loss to train on.

    Raises:
        HeadpruneError: If it has no such loss.
    """
    causal = task == "causal-lm"
    if config.objective is HealObjective.LM_DISTILL and not causal:
        raise HeadpruneError(
            f"objective lm+distill is for causal language models, and the task of this one is "
            f"{task}. Use objective distill."
        )
    if config.objective is HealObjective.AUTO:
        return HealObjective.LM_DISTILL if causal else HealObjective.DISTILL
    return config.objective


def _trained(
    run: Run, pair: Pair, config: HealConfig, resume: bool, again: str, context: Context
) -> tuple[HealTrainer, dict[str, Any]]:
    """Train the student, and leave the best weights in ``pair.model``."""
    healed = HealedModel(pair.model.net, pair.teacher, pair.bf16)
    trainer = HealTrainer(
        pair.held_out,
        config.optimizer,
        model=healed,
        remedies=_remedies(config, pair.bf16),
        args=training_arguments(
            run,
            config.steps,
            pair.of_step,
            config.seed,
            config.save_every,
            learning_rate=config.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=math.ceil(config.steps / 10),
            max_grad_norm=1.0,
        ),
        train_dataset=pair.rows,
        data_collator=pair.collate,
    )
    context.stage("measuring before")
    if config.objective is HealObjective.LM_DISTILL:
        healed.own = own_share(trainer.held_out())  # of the divergence alone
    trainer.before, before = trainer.held_out(), trainer.held_out(pair.reported)
    context.stage("healing")
    trainer.logits = _sink_logits(pair, config)
    if config.gradient_checkpointing:
        recompute_activations(pair.model.net)
    student = healed.model = trainable(pair.model.net, pair.model.attentions, config)
    for logits in trainer.logits:
        logits.requires_grad_(True)
    with stop_on_interrupt() as stopped:
        callback = HistoryCallback(trainer, context.step, stopped.is_set)
        train(trainer, run, callback, config.report_to, resume, again)
    step = trainer.take_best()
    after = trainer.held_out(pair.reported) if step else before
    pair.model.dtype = torch.float32  # for the proof
    if step:
        net = vars(pair.model)["net"] = to_float32(merged(student, config)).eval()
        if trainer.logits:
            net.set_attn_implementation("eager")
    else:
        pair.model.release()  # trained by now; it is read anew
    steps = trainer.state.global_step
    of_loss = {"before": before, "after": after, "own_share": healed.own}
    count = sum(logits.numel() for logits in trainer.logits if step)
    return trainer, {"steps": steps, "taken_after": step, "sink_logits": count, **of_loss}


def _own_windows(pair: Pair) -> list[str]:
    """Return the paths of layers with a window that the teacher lacks."""
    near, whole = (KVCache.of(net).windows for net in (pair.model.net, pair.teacher))
    return [path for path in near if path not in whole]


def _refuse_no_logits(pair: Pair, config: HealConfig) -> None:
    """Refuse to leave out sink logits where there would be none.

    Raises:
        HeadpruneError: With the reason.
    """
    own = pair.model.net.config
    why = None if own.model_type == "granite_swa" else no_sink_logits(own)
    why = why if _own_windows(pair) else "no layer has a window that the teacher lacks."
    why = "models in shards get none." if in_shards() else why
    if why and not config.sink_logits:
        raise HeadpruneError(f"--config sink_logits=false has no effect: {why}")


def _sink_logits(pair: Pair, config: HealConfig) -> list[nn.Parameter]:
    """Return the sink logits of layers whose window the teacher lacks, fitted if they are new."""
    net, paths = pair.model.net, _own_windows(pair)
    if not paths or not config.sink_logits or in_shards():
        return []
    if no_sink_logits(net.config) is None:
        batches = [pair.collate([row]) for row in islice(pair.rows, _FIT_ROWS)]
        vars(pair.model)["net"] = net = with_sink_logits(net, sink_logits(net, paths, batches))
    if net.config.model_type != "granite_swa":
        return []
    net.set_attn_implementation(IN_ONE_KERNEL)
    return [net.get_submodule(path).sinks for path in paths]


def _written(
    run: Run,
    pair: Pair,
    config: HealConfig,
    trainer: HealTrainer,
    about: dict[str, Any],
    output: Path,
    context: Context,
) -> Healed:
    """Write and prove the healed model, and remove its checkpoints."""
    step, expected, edit = about["taken_after"], None, pair.edit
    if in_shards():
        context.stage("probing the healed model")
        expected = probed(pair.model.net, pair.stored)
        pair.model.release()  # the main process writes alone, and reads no shards
        weights = stored_weights(run.checkpoints / f"checkpoint-{step}") if step else {}
        edit = replace(edit, tensors=weights)
    elif step:
        edit = replace(edit, tensors=dict(pair.model.net.named_parameters()))

    def written() -> Pruned:
        healing = Healing(
            teacher=str(pair.teacher_source),
            teacher_id=id_of_model(pair.teacher_source),
            seed=config.seed,
            optimizer=config.optimizer.value,
            objective=config.objective.value,
            learning_rate=config.learning_rate,
            conversion=pair.conversion,
            **about,
        )
        changes = Changes(healing, history=trainer.write_history(run.folder))
        writing = Writing(out_dtype=config.out_dtype)
        with sharding(False), placing(Placement.AUTO):
            pruned = write(pair.model, edit, output, changes, writing, context, expected)
        run.remove()
        return pruned if step else replace(pruned, warnings=(*pruned.warnings, _NO_BETTER))

    return Healed(processes.on_main(written), **about)


def _remedies(config: HealConfig, bf16: bool) -> tuple[str, str]:
    """Return advice where a number is not finite: before, and after training."""
    precision = "try bf16=false, or " if bf16 else ""
    return (
        f"Nothing was trained yet: {precision}look at both models with 'headprune evaluate', and "
        "at the text.",
        f"Lower --learning-rate (now {config.learning_rate:g}), {precision}train fewer steps, and "
        "start anew with --overwrite.",
    )


def _resume_command(
    model: str | Path,
    teacher: str | Path,
    data: DataConfig,
    output: Path,
    config: HealConfig,
    rerun: Resuming,
    context: Context,
) -> str:
    """Return how a user resumes: the command, which may have been another one that heals too."""
    if processes.count() > 1:  # how they were started is not known here
        return "Continue with the same command and --resume."
    usual = DataConfig(source=data.source, split=data.split)
    changed = {
        name: getattr(value, "value", value)
        for now, then in ((data, usual), (config, HealConfig(steps=config.steps)))
        for name, value in now
        if value != getattr(then, name)
    }
    line = command(
        "heal",
        model,
        output,
        teacher=teacher,
        data=data.source if data.split == "train" else f"{data.source}@{data.split}",
        steps=config.steps,
        config=tuple(f"{name}={value}" for name, value in changed.items()),
        trust_remote_code=context.allowed.trust_remote_code,
        overwrite=rerun.overwrite,
        device=devices.asked(),
        resume=rerun.resume,
    )
    return f"Continue with: {line}"
