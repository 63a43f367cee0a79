"""transformers.Trainer with small checkpoints, a history, and a clean stop."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint

from headprune.errors import CheckpointError, HeadpruneError
from headprune.training import processes

TRAINED = "trained.safetensors"


class Interrupted(HeadpruneError):
    """The user stopped the training; it can go on from its last checkpoint."""

    exit_code = 130


@dataclass(frozen=True)
class Step:
    """One line of a history.

    Attributes:
        step: Optimiser steps done.
        steps: Optimiser steps in all.
        loss: The objective's loss of this step, without any penalty.
    """

    step: int
    steps: int
    loss: float


class Trained(nn.Module):
    """What a ``SlimTrainer`` trains: a module that gives the loss of a batch."""

    accepts_loss_kwargs = False  # tells Trainer that losses are means over the batch

    def trained_state(self) -> dict[str, Tensor]:
        """The tensors that move, by their names in this module."""
        moving = ((n, p.detach()) for n, p in self.named_parameters() if p.requires_grad)
        return {name: tensor.contiguous() for name, tensor in moving}


def recompute_in_eval(model: nn.Module) -> None:
    """Lets gradient checkpointing work in eval mode: a layer recomputes only while it trains."""
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


class SlimTrainer(Trainer):  # type: ignore[misc]
    """Trainer whose checkpoints hold only what moves, and which leaves progress to callbacks."""

    def __init__(self, model: Trained, **kwargs: Any) -> None:
        super().__init__(model=model, **kwargs)
        self.remove_callback(PrinterCallback)
        self.last_loss = float("nan")  # of this process, until the step is recorded

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.model.trained_state(), folder / TRAINED)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        state = load_file(Path(resume_from_checkpoint) / TRAINED)
        self.model.load_state_dict(state, strict=False)


class HistoryCallback(TrainerCallback):  # type: ignore[misc]
    """Writes one JSON line per step, reports it, and stops when asked to.

    All processes keep the same record and stop at the same step; the main one writes and reports.

    Args:
        trainer: The trainer it serves.
        history: JSONL file that gets one record per step.
        on_step: Called with every record.
        should_stop: Asked after every step; True saves a checkpoint and ends the training.
    """

    def __init__(
        self,
        trainer: SlimTrainer,
        history: Path,
        on_step: Callable[[Any], None],
        should_stop: Callable[[], bool],
    ) -> None:
        self.trainer = trainer
        self.history = history
        self.on_step = on_step
        self.should_stop = should_stop
        self.interrupted = False

    def record(self, state: Any) -> Any:
        """What to write of the step that was just made: a dataclass with a ``step``."""
        return Step(state.global_step, state.max_steps, self.trainer.last_loss)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drops records of steps after the checkpoint that the run goes on from."""
        if not processes.is_main():
            if not state.global_step:  # Trainer gave all the same seed; what they draw must differ
                torch.manual_seed(args.seed + processes.rank())
            return
        lines = self.history.read_text().splitlines() if self.history.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= state.global_step]
        self.history.write_text("".join(f"{line}\n" for line in kept))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Records the step."""
        (self.trainer.last_loss,) = processes.mean([self.trainer.last_loss])
        record = self.record(state)
        if processes.is_main():
            with self.history.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(record)) + "\n")
            self.on_step(record)
        (stop,) = processes.mean([float(self.should_stop())])
        if stop:
            self.interrupted = True
            control.should_save = True
            control.should_training_stop = True


def slim_arguments(
    folder: Path, steps: int, batch_size: int, seed: int, save_every: int | None, **others: Any
) -> TrainingArguments:
    """Trainer's settings: checkpoints in ``folder``, nothing printed, one device a process.

    Raises:
        HeadpruneError: If the batch cannot be shared by the processes that were started.
    """
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=processes.share_of(batch_size),
        seed=seed,
        save_strategy="steps",
        save_steps=save_every or max(1, steps // 10),
        save_total_limit=2,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_timeout=processes.PATIENCE_S,
        use_cpu=processes.on_cpu(),
        **others,
    )
    # several GPUs are for accelerate launch; DataParallel would copy the model away from its hooks
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


def last_complete_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that a kill did not cut short: Trainer writes its state file last."""
    while folder.is_dir() and (found := get_last_checkpoint(str(folder))):
        checkpoint = Path(found)
        try:
            json.loads((checkpoint / "trainer_state.json").read_text())
            return checkpoint
        except (OSError, json.JSONDecodeError):
            checkpoint.rename(checkpoint.with_name(f"incomplete-{checkpoint.name}"))
    return None


@contextmanager
def disk_errors(output: Path) -> Iterator[None]:
    """A checkpoint that cannot be written ends the run in a sentence."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error):
            raise
        raise CheckpointError(
            f"Could not write to '{output}' ({str(error).splitlines()[0]}). Free some space, then "
            "go on from the last whole checkpoint with --resume."
        ) from error


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
