"""headprune heal: a smaller model is trained to match the one it came from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from pydantic import BaseModel
from transformers import PreTrainedModel

from headprune import devices, processes
from headprune.config import DataConfig, Dtype, HealConfig, Objective, Resuming
from headprune.data.batches import batches
from headprune.data.sources import refuse_missing_file
from headprune.declaration import Context
from headprune.distillation.by_layer import LayerHealer, Text, Watch, refuse_by_layer
from headprune.distillation.shards import (
    ShardedResult,
    refuse_sharded,
    refuse_uneven_ties,
    refuse_unmapped,
)
from headprune.distillation.trainer import (
    HealedModel,
    HealTrainer,
    heal_arguments,
    merged,
    refuse_without_peft,
    trainable,
)
from headprune.errors import DataError, HeadpruneError
from headprune.exporting.publish import (
    Changes,
    Pruned,
    WriteOrder,
    refuse_unprovable,
)
from headprune.exporting.streamed import write_changed
from headprune.io.outputs import place_of
from headprune.io.shell import command
from headprune.model.attention import attention_of
from headprune.model.identity import id_of_model
from headprune.model.loading import load_config, load_tokenizer, task_of
from headprune.model.opening import as_it_fits, load, result_dtypes
from headprune.model.placement import placed, reshard
from headprune.model.refusals import refuse_without_text
from headprune.placements import Placement, asked_placement, in_shards, placing
from headprune.planning.from_scores import plan_from_scores
from headprune.schemas.plan import ModelIdentity
from headprune.schemas.records import Healing, LayerHealing
from headprune.surgery.cut import resolve
from headprune.tensors.units import Unit
from headprune.training.resumable import (
    HistoryCallback,
    Remedies,
    stop_on_interrupt,
    train,
)
from headprune.training.work import HealSettings, at_work, settings_now

HELD_OUT = 16  # rows of the text that are not trained on, to judge by
_NO_BETTER = (
    "Healing brought the model no nearer to its teacher on text that it was not trained on: the "
    "result has the weights that it began with. Try more text, or a lower --learning-rate."
)


@dataclass(frozen=True)
class Healed:
    """A finished healing.

    Attributes:
        pruned: The result, as of every command that writes a model.
        before: Divergence from the teacher on held-out rows, before.
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
    layers: dict[str, LayerHealing] | None = None


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
    it began with, if training brings it no nearer.

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
    shard, allowed = in_shards(), context.allowed
    if config.by_layer:
        refuse_by_layer(shard)
    elif asked_placement() is Placement.LAYERS:
        raise HeadpruneError(
            "--placement layers: training holds the whole model, but for --by-layer. Give that, or "
            "leave out --placement."
        )
    if shard:
        refuse_sharded(config)
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
        **vars(allowed),
        shard=shard,
        overwrite=rerun.overwrite,
        placement=Placement.LAYERS.value if asked_placement() is Placement.LAYERS else None,
        resume=True,
    )
    inputs = [place_of(place) for place in (model, teacher, data)]

    def unhealed(weights: bool = True) -> tuple[PreTrainedModel, ModelIdentity]:
        return load(model, Dtype.FLOAT32, allowed, weights=weights)

    whole = nullcontext() if shard or config.by_layer else placing(Placement.WHOLE)
    with at_work(output, settings, inputs, rerun) as work, whole:
        refuse_missing_file(data.source)
        refuse_without_peft(config)
        load_config(teacher, trust_remote_code=allowed.trust_remote_code)
        context.stage("loading both models")
        if shard:
            skeleton = unhealed(weights=False)[0]
            refuse_unmapped(skeleton, model)
            refuse_uneven_ties(skeleton, model)
        net, source = unhealed()
        stored = result_dtypes(net, model, config.out_dtype)
        refuse_without_text(net, "heal")
        bf16 = config.bf16 and devices.computes_bfloat16()
        dtype = "bfloat16" if bf16 and not config.by_layer else "float32"
        original = as_it_fits(
            teacher,
            dtype,
            trust_remote_code=allowed.trust_remote_code,
            drop_unexpected=allowed.drop_unexpected,
        )
        original = placed(original)
        _check_pair(net, original)
        plan = plan_from_scores([], Unit.HEAD, [], 0, source, whole=attention_of(net))
        refuse_unprovable(net, plan)
        reshard(net)
        context.stage("reading the data")
        tokenizer = load_tokenizer(model, trust_remote_code=allowed.trust_remote_code)
        rows, collate = batches(Objective.DISTILL, net, tokenizer, data, config)
        rows, held_out = _split(rows, config.batch_size)
        if not rerun.resume:
            processes.on_main(lambda: work.begin(settings))

        def written(trained: _Trained, write: Callable[[WriteOrder], Pruned]) -> Healed:
            healing = Healing(
                teacher=str(teacher),
                teacher_id=id_of_model(teacher),
                seed=config.seed,
                **vars(trained),
            )
            record = Changes(healing, made_by=context.made_by, history=work.history)
            pruned = write(WriteOrder(source, model, plan, output, stored, record))
            work.remove()
            if not trained.taken_after:
                pruned = replace(pruned, warnings=(*pruned.warnings, _NO_BETTER))
            steps, taken_after = trained.steps, trained.taken_after
            return Healed(pruned, trained.before, trained.after, steps, taken_after)

        def in_memory(healed: PreTrainedModel) -> Callable[[WriteOrder], Pruned]:
            cuts = resolve(plan.model_copy(update={"model": None}), healed, ragged=True)
            return lambda order: write_changed(healed, cuts, order, context)

        go_on, remedies = f"Go on with: {again}", _remedies(config, bf16)
        if config.by_layer:
            text = Text.of(rows, held_out, collate, config)
            healer = LayerHealer(net, original, text, config, bf16)
            context.stage("measuring before")
            before = healer.divergence()
            layers = healer.heal(work, Watch(context, go_on, remedies))
            context.stage("measuring after")
            steps, after = sum(layer.steps for layer in layers.values()), healer.divergence()
            if after < before:
                return written(_Trained(steps, before, after, steps, layers), in_memory(net))
            return written(_Trained(steps, before, before, 0, layers), in_memory(unhealed()[0]))
        if config.gradient_checkpointing:
            enable = getattr(
                net, "activation_checkpointing_enable", net.gradient_checkpointing_enable
            )
            enable({"use_reentrant": False})
        student = trainable(net, attention_of(net), config)
        healed = HealedModel(student, original, bf16)
        trainer = HealTrainer(
            held_out,
            model=healed,
            remedies=remedies,
            args=heal_arguments(config, work.checkpoints),
            train_dataset=rows,
            data_collator=collate,
        )
        context.stage("measuring before")
        before = trainer.held_out()
        context.stage("healing")
        with stop_on_interrupt() as stopped:
            callback = HistoryCallback(trainer, work, context.step, stopped.is_set)
            train(trainer, work, callback, rerun.resume, go_on, context.stage)

        def best() -> tuple[int, float]:
            return trainer.take_best(before) or (0, before)

        taken_after, after = best() if shard else processes.on_main(best)

        def result() -> PreTrainedModel:
            return (merged(student, config) if taken_after else unhealed()[0]).eval()

        sharded: ShardedResult | None = None
        if shard:
            context.stage("probing the healed model")
            checkpoint = work.checkpoints / f"checkpoint-{taken_after}" if taken_after else None
            sharded = ShardedResult.of(result(), skeleton, checkpoint, stored)

        def finish() -> Healed:
            trained = _Trained(trainer.state.global_step, before, after, taken_after)
            if sharded is not None:
                return written(trained, partial(sharded.write, context=context))
            return written(trained, in_memory(result()))

        return processes.on_main(finish)


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
    """The settings that are not the usual ones."""
    return {name: value for name, value in config if value != getattr(usual, name)}


def _check_pair(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    sizes = [m.config.get_text_config().vocab_size for m in (student, teacher)]
    if task_of(student) != task_of(teacher) or sizes[0] != sizes[1]:
        raise HeadpruneError(
            f"The model to heal is a {type(student).__name__} over {sizes[0]:,} tokens, the "
            f"teacher a {type(teacher).__name__} over {sizes[1]:,}. Give the model it came from."
        )


def _split(rows: Dataset, batch_size: int) -> tuple[Dataset, Dataset]:
    """Training rows, and a few that are held out."""
    count = min(HELD_OUT, len(rows) // 4)
    if len(rows) - count < batch_size or not count:
        raise DataError(
            f"The text makes {len(rows)} rows, too few to train in batches of {batch_size} and "
            "hold some out. Give more text, or a smaller --seq-len."
        )
    first = len(rows) - count
    return rows.select(range(first)), rows.select(range(first, len(rows)))
