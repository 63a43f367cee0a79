"""Healing layer by layer: every block learns to give what the original's block gives.

    original   embeddings -> block 0 -> block 1 -> ...     its outputs are what is to be given
                                |          |
    student    embeddings -> block 0 -> block 1 -> ...     on what the healed blocks before give

A block is trained on the student's own stream, not on the original's: what the blocks before it
could not mend is in its inputs when the model is used, and later blocks make up for earlier ones.
Blocks as the unit of reconstruction: BRECQ (Li et al. 2021, arXiv:2102.05426). Outputs of the
original as targets for inputs of the changed model: AdaRound (Nagel et al. 2020, arXiv:2004.10568).

In memory are two blocks of each model, where these run layer by layer (one is read ahead), the
moments of the weights of one, and both streams on the CPU.
"""

from __future__ import annotations

import math
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, get_cosine_schedule_with_warmup

from headprune import processes
from headprune.config import HealConfig, HealOptimizer, HealTrain
from headprune.declaration import Context
from headprune.distillation.optimizer import USUAL_RATE
from headprune.distillation.pair import Pair
from headprune.distillation.stack import Stack, Streams
from headprune.distillation.trainer import HealedModel
from headprune.errors import CheckpointError, HeadpruneError, Interrupted, TrainingError
from headprune.io.parsing import read_as
from headprune.model.attention import attention_of
from headprune.model.batch import Batch
from headprune.model.placement import on_device
from headprune.model.residency import present
from headprune.schemas.records import LayerHealing
from headprune.training import checkpoints
from headprune.training.checkpoints import PARTIAL, PROGRESS, STATE, first_infinite, kind_of
from headprune.training.divergence import variance_error
from headprune.training.resumable import Remedies, TrainingStep, stop_on_interrupt
from headprune.training.work import Work


@dataclass(frozen=True)
class Batched:
    """Sequences in batches.

    Attributes:
        trained: Those that are trained on.
        held_out: Those that judge.
    """

    trained: Sequence[Batch]
    held_out: Sequence[Batch]

    @classmethod
    def of(cls, pair: Pair, config: HealConfig) -> Batched:
        """As many batches as there are steps, or all, if the text has fewer."""
        rows, held_out, collate = pair.rows, pair.held_out, pair.collate
        size, few, drawn = pair.of_step, config.batch_size, list(range(len(rows)))
        random.Random(config.seed).shuffle(drawn)
        count = min(config.steps, len(rows) // size)
        return cls(
            [collate([rows[i] for i in drawn[at * size : (at + 1) * size]]) for at in range(count)],
            [
                collate([held_out[i] for i in range(at, min(at + few, len(held_out)))])
                for at in range(0, len(held_out), few)
            ],
        )


@dataclass(frozen=True)
class Reporting:
    """Who is told how it goes on.

    Attributes:
        context: What it runs in.
        go_on: What the user is told after Ctrl-C.
        remedies: What to change where numbers are not finite.
    """

    context: Context
    go_on: str
    remedies: Remedies


class _Kept(BaseModel):
    """What a checkpoint says of a block."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: Literal[1] = 1
    layer: LayerHealing


def refuse_by_layer(shard: bool) -> None:
    """Refuses several processes.

    Raises:
        HeadpruneError: Saying what to leave out.
    """
    if shard or processes.count() > 1:
        raise HeadpruneError(
            "--by-layer trains one block after the other in one process. Leave out --shard and "
            "the launcher, or leave out --by-layer."
        )


class LayerHealer:
    """Trains the blocks of a student, the first ones first.

    Args:
        student: The model to heal; its weights change in place.
        original: The model to match.
        text: What they read.
        config: How to train.
        bf16: Whether to compute in bfloat16 (autocast).

    Raises:
        HeadpruneError: If the models are not two equal stacks of blocks.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        original: PreTrainedModel,
        text: Batched,
        config: HealConfig,
        bf16: bool,
    ) -> None:
        self.pair = HealedModel(student, original, bf16).eval()
        self.student, self.original = Stack(student, bf16), Stack(original, bf16)
        if len(self.student.blocks) != len(self.original.blocks):
            raise HeadpruneError(
                f"--by-layer: the model to heal has {len(self.student.blocks)} layers, and the "
                f"teacher {len(self.original.blocks)}. Leave out --by-layer."
            )
        self.text, self.config = text, config
        self.moving = _moving(student, self.student.paths, config.train)
        self.steps = config.steps * sum(map(bool, self.moving))

    @torch.no_grad()
    def divergence(self) -> float:
        """Mean divergence of the whole models over the held-out batches."""
        student = self.student.net
        batches = (on_device(student, batch) for batch in self.text.held_out)
        return fmean(float(self.pair(batch)) for batch in batches)

    def heal(self, work: Work, reporting: Reporting) -> dict[str, LayerHealing]:
        """Heals every block that has something to train, going on from those kept in ``work``.

        Returns:
            What became of each of them.

        Raises:
            CheckpointError: If a block cannot be kept.
            Interrupted: After Ctrl-C; the blocks before are kept.
            TrainingError: If a number is not finite.
        """
        self.student.net.requires_grad_(False)
        run = _Run(self, work, reporting)
        batches = (*self.text.trained, *self.text.held_out)
        states, wanted = (
            [stack.entering(batch) for batch in batches] for stack in (self.student, self.original)
        )
        streams = Streams(batches, states, wanted)
        with stop_on_interrupt() as stopped:
            for number in range(len(self.student.blocks)):
                reporting.context.stage(f"healing layer {number + 1} of {len(self.student.blocks)}")
                self.original.advance(number, wanted, batches)
                with present(self.student.blocks[number]):
                    if self.moving[number]:
                        run.visit(number, streams, stopped.is_set)
                    self.student.advance(number, states, batches)
        run.keep_history()
        return run.healed

    def weights(self, number: int) -> dict[str, nn.Parameter]:
        """What is trained of a block that is present, by name in it."""
        named = self.student.blocks[number].named_parameters()
        return {name: weight for name, weight in named if name in self.moving[number]}

    def error(self, number: int, at: int, streams: Streams, variance: Tensor) -> Tensor:
        """How far the outputs of a block are from those that are wanted, on one batch."""
        batch = streams.batches[at]
        outputs = self.student.run(number, streams.states[at], batch)
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        return variance_error(outputs, streams.wanted[at].to(outputs.device), mask, variance)

    @torch.no_grad()
    def held_out(self, number: int, streams: Streams, variance: Tensor) -> float:
        """The same over the held-out batches."""
        places = range(len(self.text.trained), len(streams.batches))
        return fmean(float(self.error(number, at, streams, variance)) for at in places)


class _Run:
    """One pass over the blocks, and how far it is.

    Args:
        healer: What is trained.
        work: Where blocks and steps are kept.
        reporting: Who is told.
    """

    def __init__(self, healer: LayerHealer, work: Work, reporting: Reporting) -> None:
        self.healer, self.work, self.reporting = healer, work, reporting
        self.healed: dict[str, LayerHealing] = {}
        self._step, self._begun = 0, False

    def visit(self, number: int, streams: Streams, stop: Callable[[], bool]) -> None:
        """Trains a block that is present, or takes what was kept of it."""
        weights = self.healer.weights(number)
        layer = None if self._begun else self._kept(number, weights)
        if layer is None:
            self.keep_history()
            layer = self._healed(number, streams, stop)
            trained = weights if layer.after < layer.before else {}
            _keep(self._place(number), _Kept(layer=layer), trained)
        else:
            self._step += layer.steps
        self.healed[self.healer.student.paths[number]] = layer

    def keep_history(self) -> None:
        """Drops records of steps after the blocks that were kept, before the first new one."""
        if not self._begun:
            self.work.cut_history(self._step, TrainingStep)
        self._begun = True

    def _place(self, number: int) -> Path:
        return self.work.checkpoints / f"checkpoint-{number + 1}"

    @torch.no_grad()
    def _kept(self, number: int, weights: dict[str, nn.Parameter]) -> LayerHealing | None:
        """Takes what was kept of a block; None where that is nothing, or damaged."""
        place = self._place(number)
        if not place.exists():
            return None
        try:
            layer, tensors = read_as(_Kept, place / PROGRESS).layer, load_file(place / STATE)
            trained = weights if layer.after < layer.before else {}
            if {n: kind_of(t) for n, t in tensors.items()} != {
                n: kind_of(t) for n, t in trained.items()
            } or first_infinite(tensors):
                raise CheckpointError(f"'{place}' is of another training.")
        except (CheckpointError, OSError, SafetensorError):
            self.reporting.context.stage(
                f"{place.name} is damaged: healing layer {number + 1} again"
            )
            return None
        for name, tensor in tensors.items():
            weights[name].copy_(tensor)
        return layer

    def _healed(self, number: int, streams: Streams, stop: Callable[[], bool]) -> LayerHealing:
        """Trains a block; its weights are those before, where training brings it no nearer."""
        healer, weights = self.healer, self.healer.weights(number)
        begun_with = {name: weight.detach().clone() for name, weight in weights.items()}
        variance = streams.variance(len(healer.text.trained))
        before = healer.held_out(number, streams, variance)
        if not math.isfinite(before):
            raise self._broken(f"layer {number + 1} is {before} away before", trained=False)
        if before == 0:  # as long as all layers before are those of the original
            return LayerHealing(before=before, after=before, steps=0)
        steps, first = healer.config.steps, self._step
        optimiser = torch.optim.AdamW(
            weights.values(),
            lr=healer.config.learning_rate or USUAL_RATE[HealOptimizer.ADAMW],
            weight_decay=0.0,
        )
        schedule = get_cosine_schedule_with_warmup(optimiser, math.ceil(steps / 10), steps)
        seed = f"{healer.config.seed} {number}"
        for at in islice(_order(len(healer.text.trained), seed), steps):
            for weight in weights.values():
                weight.requires_grad_(True)
            loss = healer.error(number, at, streams, variance)
            loss.backward()
            nn.utils.clip_grad_norm_(weights.values(), 1.0)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
            self._record(loss.item())
            if stop():
                raise Interrupted(
                    f"Stopped in layer {number + 1} of {len(healer.moving)}; those before it are "
                    f"kept in '{self.work.folder}'. {self.reporting.go_on}"
                )
        for weight in weights.values():
            weight.requires_grad_(False)
        after = healer.held_out(number, streams, variance)
        if not after < before:
            for name, weight in weights.items():
                weight.copy_(begun_with[name])
            after = before
        return LayerHealing(before=before, after=after, steps=self._step - first)

    def _record(self, loss: float) -> None:
        self._step += 1
        if not math.isfinite(loss):
            raise self._broken(f"the loss is {loss} at", trained=self._step > 1)
        record = TrainingStep(self._step, self.healer.steps, loss)
        self.work.record(record)
        self.reporting.context.step(record.step, record.steps, record.numbers)

    def _broken(self, what: str, trained: bool) -> TrainingError:
        remedies = self.reporting.remedies
        remedy = remedies.trained if trained else remedies.untrained
        return TrainingError(
            f"Training broke down: {what} step {self._step} of {self.healer.steps}. {remedy}"
        )


def _order(count: int, seed: str) -> Iterator[int]:
    """Batches without end, each once before any comes again."""
    drawn, places = random.Random(seed), list(range(count))
    while True:
        drawn.shuffle(places)
        yield from places


def _keep(place: Path, kept: _Kept, trained: Mapping[str, Tensor]) -> None:
    """Writes what was trained of a block, whole or not at all.

    Raises:
        CheckpointError: If it cannot be written.
    """
    partial = place.parent / PARTIAL
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file({n: t.detach().contiguous() for n, t in trained.items()}, partial / STATE)
        (partial / PROGRESS).write_text(kept.model_dump_json(), encoding="utf-8")
        shutil.rmtree(place, ignore_errors=True)
        partial.rename(place)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise checkpoints.unwritable(place.parent, error) from error


def _moving(net: PreTrainedModel, paths: Sequence[str], train: HealTrain) -> list[frozenset[str]]:
    """Per block, the names in it of the weights that are trained: those that stand in it alone."""
    places = Counter(id(weight) for _, weight in net.named_parameters(remove_duplicate=False))
    projections = tuple(f"{p.path}." for a in attention_of(net) for p in a.projections)

    def moves(full: str, weight: nn.Parameter) -> bool:
        asked = train is HealTrain.ALL or full.startswith(projections)
        return asked and places[id(weight)] == 1 and weight.numel() > 0

    return [
        frozenset(
            name
            for name, weight in net.get_submodule(path).named_parameters()
            if moves(f"{path}.{name}", weight)
        )
        for path in paths
    ]
