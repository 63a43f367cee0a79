"""headprune heal: a smaller model is trained to match the one it came from."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from transformers import PreTrainedModel

from headprune import devices, processes
from headprune.config import DataConfig, HealConfig, HealObjective, Resuming, Writing
from headprune.context import Context
from headprune.data.sources import refuse_missing_file
from headprune.distillation.optimizer import resolved
from headprune.distillation.pair import HealingJob, Pair
from headprune.distillation.shards import (
    ShardedResult,
    refuse_sharded,
)
from headprune.distillation.trainer import (
    HealedModel,
    HealTrainer,
    heal_arguments,
    merged,
    refuse_without_peft,
    trainable,
)
from headprune.errors import HeadpruneError
from headprune.exporting.write import Changes, Pruned, write
from headprune.io.outputs import place_of
from headprune.io.shell import command
from headprune.model.attention import attention_of
from headprune.model.identity import id_of_model
from headprune.model.loading import load_config, task_of
from headprune.placements import Placement, in_shards, placing, sharding
from headprune.proof.equivalence import Expectation
from headprune.schemas.records import Healing
from headprune.surgery.edit import Edit
from headprune.training.divergence import own_share
from headprune.training.loss_module import recompute_activations
from headprune.training.resumable import (
    HistoryCallback,
    Remedies,
    stop_on_interrupt,
    train,
)
from headprune.training.work import HealSettings, at_work, settings_now

_NO_BETTER = (
    "Healing brought the model no nearer to its teacher on text that it was not trained on: the "
    "result has the weights that it began with. Try more text, or a lower --learning-rate."
)


@dataclass(frozen=True)
class Healed:
    """A finished healing.

    Attributes:
        pruned: The result, as of every command that writes a model.
        before: Divergence from the teacher on rows that chose nothing, before.
        after: The same, of the weights that were taken.
        steps: Optimiser steps made.
        taken_after: Steps after which the weights did best; 0 if none did better than before.
    """

    pruned: Pruned
    before: float
    after: float
    steps: int
    taken_after: int

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        manifest = self.pruned.manifest.model_dump(mode="json")
        divergence = {"before": self.before, "after": self.after}
        return {
            "steps": self.steps,
            "taken_after": self.taken_after,
            "divergence": divergence,
            "manifest": manifest,
        }


@dataclass(frozen=True)
class _Trained:
    """What a training came to, as ``Healing`` has it."""

    steps: int
    before: float
    after: float
    taken_after: int


def heal(
    model: str | Path,
    teacher: str | Path,
    data: DataConfig,
    output: Path,
    config: HealConfig,
    rerun: Resuming = Resuming(),
    context: Context = Context(),
) -> Healed:
    """Trains a cut or converted model to match its teacher, and writes it, proven.

    It is measured on held-out text at every checkpoint, and the best weights are taken: those that
    it began with, if training brings it no nearer. What is reported is of other held-out text.

    Several processes share every batch (see ``training.processes``); one of them writes and tells.

    Checkpoints lie beside ``output`` in a folder of its name with ``-checkpoints`` until the end.

    Args:
        model: The model to heal: folder or hub id.
        teacher: The model to match: folder or hub id.
        data: Plain text; labels are not used.
        output: Folder to write; it appears whole or not at all.
        config: How to train.
        rerun: What becomes of what an earlier run left.
        context: What it runs in.

    Raises:
        HeadpruneError: If models and data do not fit together, or the output cannot be written.
        Interrupted: After Ctrl-C; a checkpoint has been written.
        ProofError: If the folder does not compute what the healed model computes.
        TrainingError: If training came to numbers that are not finite.
    """
    processes.share_of(config.batch_size)
    if in_shards():
        refuse_sharded(config)
    config = resolved(config)
    if not processes.is_main():
        context = context.unheard()
    settings = settings_now(HealSettings, model, teacher=str(teacher), data=data, heal=config)
    again = command(
        "heal",
        model,
        teacher=teacher,
        data=data.source,
        output=output,
        **_changed(data, DataConfig(source=data.source)),
        **{"steps": config.steps, **_changed(config, HealConfig(steps=config.steps))},
        **vars(context.allowed),
        shard=in_shards(),
        overwrite=rerun.overwrite,
        device=devices.asked(),
        resume=True,
    )
    # how several processes were started is not known here
    alone = processes.count() == 1
    go_on = f"Go on with: {again}" if alone else "Go on with the same command and --resume."
    inputs = [place_of(place) for place in (model, teacher, data)]
    held_whole = nullcontext() if in_shards() else placing(Placement.WHOLE)
    with at_work(output, settings, inputs, rerun) as work, held_whole:
        refuse_missing_file(data.source)
        refuse_without_peft(config)
        load_config(teacher, trust_remote_code=context.allowed.trust_remote_code)
        job = HealingJob(model, teacher, output, config, context, work, go_on)
        pair = Pair.by(job, data)
        _objective(config, pair.net)
        if not rerun.resume:
            processes.on_main(lambda: work.begin(settings))
        return _together(job, pair, rerun.resume)


def _objective(config: HealConfig, net: PreTrainedModel) -> HealObjective:
    """What a model is healed on.

    Raises:
        HeadpruneError: If it has no such loss.
    """
    asked, causal = config.objective, task_of(net) == "causal-lm"
    if asked is HealObjective.LM_DISTILL and not causal:
        raise HeadpruneError(
            f"--objective lm+distill is for causal language models, and this is a "
            f"{type(net).__name__}. Use --objective distill."
        )
    if asked is HealObjective.AUTO and causal:
        return HealObjective.LM_DISTILL
    return HealObjective.DISTILL if asked is HealObjective.AUTO else asked


def _together(job: HealingJob, pair: Pair, resume: bool) -> Healed:
    """Trains all layers at once, in one process or several."""
    config, context, work = job.config, job.context, job.work
    if config.gradient_checkpointing:
        recompute_activations(pair.net)
    student = trainable(pair.net, attention_of(pair.net), config)
    healed = HealedModel(student, pair.original, pair.bf16)
    trainer = HealTrainer(
        pair.held_out,
        config.optimizer,
        model=healed,
        remedies=_remedies(config, pair.bf16),
        args=heal_arguments(config, work.checkpoints, pair.of_step),
        train_dataset=pair.rows,
        data_collator=pair.collate,
    )
    context.stage("measuring before")
    before, reported = trainer.held_out(), trainer.held_out(pair.reported)
    if _objective(config, pair.net) is HealObjective.LM_DISTILL:
        healed.own = own_share(before)
    context.stage("healing")
    with stop_on_interrupt() as stopped:
        callback = HistoryCallback(trainer, work, context.step, stopped.is_set)
        train(trainer, work, callback, resume, job.go_on, context.stage)

    def best() -> tuple[int, float]:
        taken = trainer.take_best(before)
        return (0, reported) if taken is None else (taken[0], trainer.held_out(pair.reported))

    taken_after, after = best() if in_shards() else processes.on_main(best)
    trained = _Trained(trainer.state.global_step, reported, after, taken_after)

    healed_net = merged(student, config).eval() if taken_after else None
    if not in_shards():
        edit = pair.edit
        if healed_net is None:
            pair.model.release()  # trained by now; it is read anew
        else:
            vars(pair.model)["net"] = healed_net
            edit = replace(edit, tensors=dict(healed_net.named_parameters()))
        return processes.on_main(lambda: _written(job, pair, trained, edit))
    context.stage("probing the healed model")
    checkpoint = work.checkpoints / f"checkpoint-{taken_after}" if taken_after else None
    sharded = ShardedResult.of(healed_net or job.student().net, checkpoint, pair.stored)

    def write_sharded() -> Healed:
        with sharding(False), placing(Placement.AUTO):
            edit = replace(pair.edit, tensors=sharded.tensors())
            return _written(job, pair, trained, edit, sharded.expected)

    return processes.on_main(write_sharded)


def _written(
    job: HealingJob,
    pair: Pair,
    trained: _Trained,
    edit: Edit,
    expected: Expectation | None = None,
) -> Healed:
    """Write and prove the healed model, and remove its checkpoints."""
    healing = Healing(
        teacher=str(job.teacher),
        teacher_id=id_of_model(job.teacher),
        seed=job.config.seed,
        optimizer=job.config.optimizer.value,
        objective=_objective(job.config, pair.original).value,
        learning_rate=job.config.learning_rate,
        **vars(trained),
    )
    changes = Changes(healing, history=job.work.history)
    writing = Writing(out_dtype=job.config.out_dtype)
    pruned = write(pair.model, edit, job.output, changes, writing, job.context, expected)
    job.work.remove()
    if not trained.taken_after:
        pruned = replace(pruned, warnings=(*pruned.warnings, _NO_BETTER))
    return Healed(pruned, trained.before, trained.after, trained.steps, trained.taken_after)


def _remedies(config: HealConfig, bf16: bool) -> Remedies:
    """What to change where the divergence or a weight is not finite."""
    precision = "try --no-bf16, or " if bf16 else ""
    return Remedies(
        untrained=f"Nothing was trained yet: {precision}look at both models with 'headprune "
        "evaluate', and at the text.",
        trained=f"Lower --learning-rate (now {config.learning_rate:g}), {precision}train fewer "
        "steps, and start anew with --overwrite.",
    )


def _changed(config: BaseModel, usual: BaseModel) -> dict[str, Any]:
    """The settings that are not the usual ones, as options; what was turned off as ``no_...``."""
    changed = {name: value for name, value in config if value != getattr(usual, name)}
    return {
        f"no_{name}" if value is False else name: True if value is False else value
        for name, value in changed.items()
    }
