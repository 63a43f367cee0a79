"""transformers.Trainer with small checkpoints, a history, and a clean stop."""

from __future__ import annotations

import math
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer_callback import PrinterCallback

from headprune import processes
from headprune.errors import HeadpruneError, Interrupted, TrainingError
from headprune.tensors.shards import own_part, split_as
from headprune.training.checkpoints import (
    FOR_TRAINER,
    Checkpoint,
    Expected,
    Kind,
    Progress,
    best_of,
    draw_on,
    draws_here,
    first_infinite,
    found,
    kind_of,
    newest,
    read,
    unwritable,
    write,
)
from headprune.training.loss_module import LossModule
from headprune.training.work import Work


@dataclass(frozen=True)
class TrainingStep:
    """One line of a history.

    Attributes:
        step: Optimiser steps done.
        steps: Optimiser steps in all.
        loss: The objective's loss of this step, without any penalty.
    """

    step: int
    steps: int
    loss: float

    @property
    def numbers(self) -> str:
        """What moves, beside a progress bar."""
        return f"loss {self.loss:.4f}"


@dataclass(frozen=True)
class Remedies:
    """What to change where numbers are not finite.

    Attributes:
        untrained: If they were not from the start.
        trained: If training has led there.
    """

    untrained: str
    trained: str


class ResumableTrainer(Trainer):  # type: ignore[misc]
    """Trainer with checkpoints of its own, which leaves progress to callbacks.

    What Trainer would write as pickles, or can work out from the step, is in no checkpoint.
    """

    def __init__(self, model: LossModule, remedies: Remedies, **kwargs: Any) -> None:
        super().__init__(model=model, **kwargs)
        self.remove_callback(PrinterCallback)
        self.remedies = remedies
        self.last_loss = float("nan")  # of this process, until the step is recorded
        self._from: Checkpoint | None = None

    @property
    def folder(self) -> Path:
        """Where the checkpoints lie."""
        return Path(self.args.output_dir)

    def moments(self, parameter: nn.Parameter) -> dict[str, Kind]:
        """What the optimiser knows of a parameter: those of AdamW."""
        kind = kind_of(parameter)
        return {"step": ((), torch.float32), "exp_avg": kind, "exp_avg_sq": kind}

    def expected(self) -> Expected:
        """What a checkpoint of this training holds."""
        groups = self.create_optimizer().param_groups
        return Expected(
            trained={name: kind_of(t) for name, t in self.model.trained_state().items()},
            moments=[self.moments(parameter) for group in groups for parameter in group["params"]],
            steps=self.args.max_steps,
            processes=processes.count(),
            unsound=self.unsound,
        )

    def unsound(self, trained: Mapping[str, Tensor]) -> str:
        """What tensors of this training cannot be, as a clause; empty if they may be these."""
        return ""

    def held_out(self) -> float | None:
        """Loss on rows that are not trained on, if a training measures it at its checkpoints."""
        return None

    def take_best(self, begun_with: float) -> tuple[int, float] | None:
        """Takes the weights that did best on held-out rows.

        Args:
            begun_with: The loss on these rows before training.

        Returns:
            After how many steps they were had, and their loss; None where no weights of this
            training did better than those that it began with.

        Raises:
            CheckpointError: If the checkpoint that holds them cannot be read.
        """
        best = best_of(self.folder)
        if best is None or best[1] >= begun_with:
            return None
        checkpoint = read(best[0], self.expected())
        self.model.take(checkpoint.part("trained"))
        return checkpoint.progress.step, best[1]

    def go_on(self, checkpoint: Checkpoint) -> None:
        """Trains the steps after a checkpoint; after the last one there are none."""
        self._from, done = checkpoint, checkpoint.progress.step
        self.last_loss = checkpoint.progress.loss
        if done == self.args.max_steps:
            self._load_from_checkpoint(str(checkpoint.path))
            self.state.global_step = done
            return
        processes.on_main(lambda: self._tell_trainer(checkpoint.path, done))
        self.train(resume_from_checkpoint=str(checkpoint.path))

    def _tell_trainer(self, folder: Path, step: int) -> None:
        """Writes the file from which Trainer learns where it is."""
        state = TrainerState(global_step=step, train_batch_size=self.args.train_batch_size)
        state.compute_steps(self.args, self.args.max_steps)
        try:
            state.save_to_json(str(folder / FOR_TRAINER))
        except OSError as error:
            raise unwritable(folder, error) from error

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        trained = self.model.trained_state()
        own = {name: own_part(tensor) for name, tensor in trained.items()}
        infinite = next(filter(None, processes.gathered(first_infinite(own))), None)
        if infinite is not None:
            raise self.broken(f"'{infinite}' is not finite after")
        assert self.optimizer is not None
        moments = self.optimizer.state_dict()["state"]
        draws = processes.gathered(draws_here(self.args.device))
        tensors = {f"trained.{name}": tensor for name, tensor in trained.items()}
        tensors |= {
            f"moments.{index}.{name}": tensor.detach().contiguous()
            for index, of_parameter in moments.items()
            for name, tensor in of_parameter.items()
        }
        tensors |= {
            f"draws.{rank}.{name}": state
            for rank, (_, states) in enumerate(draws)
            for name, state in states.items()
        }
        progress = Progress(
            step=self.state.global_step,
            loss=self.last_loss,
            draws=tuple(numbers for numbers, _ in draws),
            held_out=self.held_out(),
        )
        write(self.folder, progress, tensors)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        assert self._from is not None
        # what does not move is not in it; that the rest is, and fits, was seen when it was read
        self.model.take(self._from.part("trained"))

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Trainer would unpickle one that somebody put there; ours have none."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self._from is not None
        assert self.optimizer is not None
        assert self.lr_scheduler is not None
        state: dict[int, dict[str, Tensor]] = {}
        moved = [each for group in self.optimizer.param_groups for each in group["params"]]
        for name, tensor in self._from.part("moments").items():
            index, moment = name.split(".")
            part = split_as(tensor, moved[int(index)]) if tensor.dim() else tensor
            state.setdefault(int(index), {})[moment] = part
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        schedule, step = self.lr_scheduler, self._from.progress.step
        schedule.last_epoch = step
        rates = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        for group, (rate, factor) in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor(step)
        # weights and moments are where they belong; random numbers are drawn on from later
        draws = {n: t for n, t in self._from.tensors.items() if n.startswith("draws.")}
        self._from = replace(self._from, tensors=draws)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            assert self._from is not None
            draw_on(self._from, processes.rank(), self.args.device)

    def broken(self, what: str, trained: bool = True) -> TrainingError:
        """Says that numbers are not finite at the current step, and what to change.

        Args:
            what: The number.
            trained: Whether something had been trained when it was computed.
        """
        step, steps = self.state.global_step, self.args.max_steps
        remedy = self.remedies.trained if trained else self.remedies.untrained
        return TrainingError(f"Training broke down: {what} step {step} of {steps}. {remedy}")


def train(
    trainer: ResumableTrainer,
    work: Work,
    callback: HistoryCallback,
    resume: bool,
    go_on: str,
    on_stage: Callable[[str], None],
) -> None:
    """Trains to the last step.

    Args:
        trainer: The trainer, new.
        work: Where history and checkpoints lie.
        callback: Keeps the history.
        resume: Go on from the last checkpoint, if one was written.
        go_on: What the user is told after Ctrl-C.
        on_stage: Called with a few words if the last checkpoint is damaged.

    Raises:
        CheckpointError: If a checkpoint can be neither written nor read.
        Interrupted: After Ctrl-C; a checkpoint has been written.
        TrainingError: If a number is not finite.
    """
    trainer.add_callback(callback)
    checkpoint = _newest(trainer, work, on_stage) if resume else None
    done = checkpoint.progress.step if checkpoint is not None else 0
    processes.on_main(lambda: work.cut_history(done, callback.kind))
    try:
        if checkpoint is None:
            trainer.train()
        else:
            trainer.go_on(checkpoint)
    except RuntimeError as error:
        if not processes.lost(error):
            raise
        raise HeadpruneError(
            f"Another of the {processes.count()} processes ended. {go_on}"
        ) from error
    if callback.interrupted:
        raise Interrupted(
            f"Stopped after step {trainer.state.global_step} of {trainer.args.max_steps}; a "
            f"checkpoint is in '{work.folder}'. {go_on}"
        )


def _newest(
    trainer: ResumableTrainer, work: Work, on_stage: Callable[[str], None]
) -> Checkpoint | None:
    """The checkpoint that all processes go on from; those after it are damaged, and go."""
    expected = trainer.expected()
    chosen: Checkpoint | None = None

    def choose() -> Path | None:
        nonlocal chosen
        chosen = newest(work.checkpoints, expected)
        if chosen is None:
            return None
        paths = found(work.checkpoints)
        for damaged in paths[paths.index(chosen.path) + 1 :]:
            on_stage(f"{damaged.name} is damaged: going on from {chosen.path.name}")
            shutil.rmtree(damaged, ignore_errors=True)
        return chosen.path

    path = processes.on_main(choose)
    if path is not None and chosen is None:  # in the processes beside the main one
        chosen = read(path, expected)
    return chosen


class HistoryCallback(TrainerCallback):  # type: ignore[misc]
    """Records every step, reports it, and stops when asked to.

    All processes keep the same record and stop at the same step; the main one writes and reports.

    Args:
        trainer: The trainer it serves.
        work: Whose history gets one record per step.
        step: Called with steps done, steps in all, and the numbers of the last.
        should_stop: Asked after every step; True saves a checkpoint and ends the training.
    """

    kind: type[TrainingStep] = TrainingStep

    def __init__(
        self,
        trainer: ResumableTrainer,
        work: Work,
        step: Callable[..., None],
        should_stop: Callable[[], bool],
    ) -> None:
        self.trainer = trainer
        self.work = work
        self.step = step
        self.should_stop = should_stop
        self.interrupted = False

    def record(self, state: Any) -> TrainingStep:
        """What to write of the step that was just made."""
        return TrainingStep(state.global_step, state.max_steps, self.trainer.last_loss)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer gave all processes the same seed; what they draw must differ."""
        if not processes.is_main() and not state.global_step:
            torch.manual_seed(args.seed + processes.rank())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Records the step."""
        (self.trainer.last_loss,) = processes.mean([self.trainer.last_loss])
        if not math.isfinite(self.trainer.last_loss):
            trained = state.global_step > 1
            raise self.trainer.broken(f"the loss is {self.trainer.last_loss} at", trained)
        record = self.record(state)
        if processes.is_main():
            self.work.record(record)
            self.step(record.step, record.steps, record.numbers)
        (stop,) = processes.mean([float(self.should_stop())])
        if stop:
            self.interrupted = True
            control.should_save = True
            control.should_training_stop = True


@contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """The first Ctrl-C ends the training after the current step; a second one ends it at once."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return

    def handler(signum: int, frame: Any) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, previous)
