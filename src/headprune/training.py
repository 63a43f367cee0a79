"""Training by transformers.Trainer, with its checkpoints: settings, history, resume.

OUT-checkpoints/   beside the output until that is complete
  config.yaml      settings of the run; without it there is no run
  checkpoints/     checkpoint-N of Trainer; trainer_state.json, with the history, comes last

Trainer saves whole models; here a checkpoint has the trained tensors alone. Trainer cannot save the
optimiser of a model in shards; here every process saves its part.
"""

from __future__ import annotations

import json
import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, get_type_hints

import torch
from accelerate.utils import patch_environment
from datasets import Dataset
from pydantic import BaseModel, ConfigDict, create_model
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import PrinterCallback

from headprune import devices, processes
from headprune.config.stages import Reporter
from headprune.errors import HeadpruneError, Interrupted, TrainingError
from headprune.io.streaming import bytes_of, header
from headprune.io.writing import write_whole
from headprune.model.batch import Batch
from headprune.model.losses import LossModule
from headprune.model.placement import is_sharded, on_device, reshard
from headprune.model.reading import damage_is
from headprune.packages import refuse_missing
from headprune.resuming import HISTORY, STATE, Run, unwritable
from headprune.tensors.shards import own_part, split_as, whole

WEIGHTS, OPTIMIZER, SCHEDULER = "model.safetensors", "optimizer-{}.pt", "scheduler.pt"
_WHOLE_OPTIMIZER, _RANDOM = "optimizer.pt", "rng_state{}.pth"
_EVERY = 10  # steps per transfer of numbers from a GPU


class _Callbacks(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    TrainerControl: dict[str, Any]


# trainer_state.json; Trainer takes any content, and fails on it later
_State = create_model(
    "_State",
    __config__=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False),
    **{name: (kind, ...) for name, kind in get_type_hints(TrainerState).items()}  # type: ignore[call-overload]
    | {
        "log_history": (list[dict[str, int | float | bool | None]], ...),
        "stateful_callbacks": (_Callbacks, ...),
    },
)


def training_arguments(
    run: Run, steps: int, batch_size: int, seed: int, save_every: int | None, **settings: Any
) -> TrainingArguments:
    """Return settings of Trainer: checkpoints of the run, no output, one device a process.

    Raises:
        HeadpruneError: If the processes cannot share the batch.
    """
    device, alone = devices.chosen(), processes.count() == 1
    # accelerate would take the first GPU; each of several processes has its own
    with patch_environment(accelerate_torch_device=device) if alone else nullcontext():
        arguments = TrainingArguments(
            output_dir=str(run.checkpoints),
            max_steps=steps,
            per_device_train_batch_size=processes.share_of(batch_size),
            seed=seed,
            save_strategy="steps",
            save_only_model=True,  # the condition for shards; lifted in ResumableTrainer
            save_steps=save_every or max(1, steps // 10),
            save_total_limit=2,
            logging_strategy="no",
            logging_nan_inf_filter=False,  # it asks the device for every loss
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=device.type == "cuda",
            ddp_timeout=processes.PATIENCE_S,
            use_cpu=device.type == "cpu",
            **settings,
        )
    if alone:
        arguments.__dict__["_setup_devices"] = device
    # DataParallel would copy the model away from its hooks
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


class ResumableTrainer(Trainer):  # type: ignore[misc]  # transformers has no types
    """Trainer whose checkpoints hold the trained tensors, also of a model in shards.

    Args:
        model: The trained model.
        remedies: Advice where a number is not finite: before any step, and later.

    Attributes:
        step_loss: Loss of the last step, on its device.
        last_loss: Loss of the last recorded step.
        before: Held-out loss before training; the best checkpoint is below it.
    """

    def __init__(self, model: LossModule, remedies: tuple[str, str], **kwargs: Any) -> None:
        super().__init__(model=model, **kwargs)
        self.args.save_only_model = False
        self.remove_callback(PrinterCallback)
        self.remedies = remedies
        self.step_loss = torch.tensor(math.nan)
        self.last_loss = self.before = math.nan

    def held_out(self) -> float | None:
        """Return the loss on held-out rows; None where a training has none."""
        return None

    @torch.no_grad()
    def row_losses(self, rows: Dataset) -> list[float]:
        """Return the loss of every row, as at test time."""
        self.model.eval()
        batches = (on_device(self.model, self.data_collator([row])) for row in rows)
        losses = [float(self.model(batch)) for batch in batches]
        reshard(self.model)
        self.model.train()
        return losses

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, **kwargs: Any
    ) -> Tensor:
        """Return the loss of a batch."""
        loss: Tensor = model(inputs)
        self.step_loss = loss.detach()
        return loss

    def resume(self, checkpoint: Path) -> None:
        """Train the steps after a checkpoint."""
        with _readable(checkpoint / STATE):
            _State.model_validate_json((checkpoint / STATE).read_bytes())
            state = TrainerState.load_from_json(str(checkpoint / STATE))
            records = [record for record in state.log_history if "loss" in record]
            steps = [record["step"] for record in records]
            if steps != [*range(1, 1 + int(checkpoint.name.rpartition("-")[2]))]:
                raise ValueError("its history is not that of its steps")
            if state.global_step != steps[-1] or state.max_steps != self.args.max_steps:
                raise ValueError("its steps are others")
            self.last_loss = float(records[-1]["loss"])
        if state.global_step == self.args.max_steps:  # Trainer would make one step more
            self._load_from_checkpoint(str(checkpoint))
            self.state = state
            return
        try:
            self.train(resume_from_checkpoint=str(checkpoint))
        except Exception as error:  # some damage shows in the next step only
            if self.state.global_step != state.global_step or processes.lost(error):
                raise
            with _readable(checkpoint):
                raise

    def take_best(self) -> int:
        """Load the checkpoint with the best held-out loss; return its step, 0 if none is better."""
        step: int = self.state.best_global_step or 0
        if step:
            self._load_from_checkpoint(f"{self.args.output_dir}/checkpoint-{step}")
        return step

    def write_history(self, folder: Path) -> Path:
        """Write a record for each step, and return the file.

        Raises:
            CheckpointError: If it cannot be written.
        """
        records = [record for record in self.state.log_history if "loss" in record]
        lines = (f"{json.dumps(record, sort_keys=True, allow_nan=False)}\n" for record in records)
        write_whole(folder / HISTORY, "".join(lines))
        return folder / HISTORY

    def broken(self, what: str, step: int, trained: bool = True) -> TrainingError:
        """Return the error of a number that is not finite at a step."""
        steps, remedy = self.args.max_steps, self.remedies[trained]
        return TrainingError(f"Training broke down: {what} step {step} of {steps}. {remedy}")

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        step = self.state.global_step
        try:
            # an interrupted run must choose among the same checkpoints as an unbroken one
            if step % self.args.save_steps == 0 or step == self.args.max_steps:
                self._judge()
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError) as error:
            # torch.save makes a RuntimeError of a full disk
            if isinstance(error, RuntimeError) and "inline_container" not in str(error):
                raise
            raise unwritable(Path(self.args.output_dir), error) from error

    def _judge(self) -> None:
        loss = self.held_out()
        best = self.before if self.state.best_metric is None else self.state.best_metric
        if loss is not None and loss < best:
            self.state.best_metric, self.state.best_global_step = loss, self.state.global_step

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the trained tensors, one at a time where they are in shards."""
        trained = self.model.trained_state()
        bad = first_infinite({name: own_part(tensor) for name, tensor in trained.items()})
        if bad := next(filter(None, processes.gathered(bad)), None):
            raise self.broken(f"'{bad}' is not finite after", self.state.global_step)
        text, order = header({name: (t.dtype, tuple(t.shape)) for name, t in trained.items()})
        tensors = (whole(trained[name]).cpu() for name in order)
        if processes.is_main():
            folder = Path(output_dir or self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / WEIGHTS).open("wb") as file:
                file.write(text)
                for tensor in tensors:
                    file.write(bytes_of(tensor).numpy().data)
        for _ in tensors:  # other processes send their parts
            pass

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not is_sharded(self.model.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        assert self.optimizer is not None
        assert self.lr_scheduler is not None
        folder, state = Path(output_dir), self.optimizer.state_dict()
        folder.mkdir(parents=True, exist_ok=True)
        state["state"] = {
            index: {name: own_part(moment) for name, moment in moments.items()}
            for index, moments in state["state"].items()
        }
        torch.save(state, folder / OPTIMIZER.format(processes.rank()))
        if processes.is_main():
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        processes.gathered(None)  # trainer_state.json follows, and says that all is there

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        file, trained = Path(resume_from_checkpoint, WEIGHTS), self.model.trained_state()
        with _readable(file), safe_open(file, framework="pt") as stored, torch.no_grad():
            if unknown := trained.keys() ^ set(stored.keys()):
                raise ValueError(f"'{min(unknown)}' is on one side only")
            for name, tensor in trained.items():
                if (kept := stored.get_tensor(name)).shape != tensor.shape:  # a smaller one spreads
                    raise ValueError(f"'{name}' has the shape {list(kept.shape)}")
                tensor.copy_(split_as(kept, tensor))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self.optimizer is not None
        sharded = is_sharded(self.model.model)
        moments_of = OPTIMIZER.format(processes.rank()) if sharded else _WHOLE_OPTIMIZER
        for name, reader in ((moments_of, self.optimizer), (SCHEDULER, self.lr_scheduler)):
            assert reader is not None
            with _readable(Path(checkpoint, name)):
                state = torch.load(Path(checkpoint, name), map_location="cpu", weights_only=True)
                if sharded and name == moments_of:
                    groups = self.optimizer.param_groups
                    weights = [weight for group in groups for weight in group["params"]]
                    for index, moments in state["state"].items():
                        for moment, tensor in moments.items():
                            moments[moment] = _as_part_of(weights[index], tensor)
                reader.load_state_dict(state)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            number = f"_{processes.rank()}" if processes.count() > 1 else ""
            file = Path(checkpoint, _RANDOM.format(number))
            with _readable(file):
                file.stat()  # Trainer does without
                super()._load_rng_state(checkpoint)


def _as_part_of(weight: Tensor, moment: Tensor) -> Tensor:
    """Return this process's part of the moment of a weight in shards."""
    if not isinstance(weight, DTensor) or not moment.dim():
        return moment
    part = moment.to(weight.to_local().device)
    place = weight.device_mesh, weight.placements
    return DTensor.from_local(part, *place, shape=weight.shape, stride=weight.stride())


def _readable(file: Path) -> AbstractContextManager[None]:
    """Turn whatever a library raises as it reads a checkpoint, or a file of it, into a refusal."""
    return damage_is(
        lambda why: (
            f"'{file}' is damaged, or of another training: {why.rstrip('.')}. "
            "Remove that checkpoint to resume from the one before, or start anew with --overwrite."
        ),
        own=True,
    )


def first_infinite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the first name of a tensor with a NaN or an infinity."""
    floating = ((name, t) for name, t in tensors.items() if t.is_floating_point())
    return next((name for name, tensor in floating if not bool(tensor.isfinite().all())), None)


class HistoryCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Keep a record of every step, report it, and stop on request.

    All processes keep the same record and stop at the same step. Numbers are taken from a GPU a few
    steps at a time: it need not wait for the host in between.

    Args:
        trainer: The trainer it serves.
        step: Called with steps done, steps in all, and the numbers of the last.
        should_stop: True ends the training after a checkpoint.
    """

    def __init__(
        self, trainer: ResumableTrainer, step: Callable[..., None], should_stop: Callable[[], bool]
    ) -> None:
        self.trainer = trainer
        self.step = step
        self.should_stop = should_stop
        self.interrupted = False
        self.every = 1 if trainer.args.device.type == "cpu" else _EVERY
        self.pending: list[dict[str, Any]] = []

    def record(self, state: TrainerState) -> dict[str, Any]:
        """Return the entry of the step in the history; numbers may be on the device."""
        return {"step": state.global_step, "steps": state.max_steps, "loss": self.trainer.step_loss}

    def check(self, record: dict[str, Any]) -> None:
        """Refuse the entry of a step with a loss that is not finite."""
        if not math.isfinite(record["loss"]):
            what, step = f"the loss is {record['loss']} at", record["step"]
            raise self.trainer.broken(what, step, trained=step > 1)

    def numbers(self, record: Mapping[str, Any]) -> str:
        """Return the text of the step in a progress bar."""
        return f"loss {record['loss']:.4f}"

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the draws of processes differ; Trainer gave all the same seed."""
        if not processes.is_main() and not state.global_step:
            torch.manual_seed(args.seed + processes.rank())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record and report the step, and stop on request.

        Raises:
            TrainingError: If a number is not finite.
        """
        self.pending.append(self.record(state))
        due = control.should_save or control.should_training_stop
        due = due or state.global_step % self.every == 0
        if not due and (processes.count() > 1 or not self.should_stop()):
            return
        self._take(state, control)
        (stop,) = processes.mean([float(self.should_stop())])
        if stop:
            self.interrupted = control.should_save = control.should_training_stop = True

    def _take(self, state: TrainerState, control: TrainerControl) -> None:
        """Take pending numbers from the device, all at once, and report the last step."""
        records, self.pending = self.pending, []
        places = [(r, n) for r in records for n, value in r.items() if isinstance(value, Tensor)]
        numbers = torch.stack([r[n].float() for r, n in places]).tolist()
        for (record, name), number in zip(places, numbers, strict=True):
            record[name] = number
        losses = processes.mean([record["loss"] for record in records])
        for record, loss in zip(records, losses, strict=True):
            record["loss"] = loss
            self.check(record)
            state.log_history.append(record)
        self.trainer.last_loss = losses[-1]
        if processes.is_main():
            self.step(state.global_step, state.max_steps, self.numbers(records[-1]))
        shown = {n: v for n, v in records[-1].items() if n not in ("step", "steps")}
        self.trainer.callback_handler.on_log(self.trainer.args, state, control, shown)


def refuse_missing_reporter(reporter: Reporter) -> None:
    """Refuse a dashboard with a missing package, before any work.

    Raises:
        HeadpruneError: Saying how to install it.
    """
    if reporter is not Reporter.NONE:
        refuse_missing(f"--report-to {reporter.value}", reporter.value)


def train(
    trainer: ResumableTrainer,
    run: Run,
    callback: HistoryCallback,
    reporter: Reporter,
    resume: bool,
    again: str,
) -> None:
    """Train to the last step.

    Args:
        trainer: The trainer, new.
        run: Holds the checkpoints.
        callback: Keeps the history.
        reporter: Dashboard that gets the numbers of a step.
        resume: Start from the newest checkpoint, if there is one.
        again: Advice on resuming.

    Raises:
        CheckpointError: If a checkpoint can be neither written nor read.
        Interrupted: After Ctrl-C; a checkpoint has been written.
        TrainingError: If a number is not finite.
    """
    trainer.add_callback(callback)
    if reporter is not Reporter.NONE:
        shows = INTEGRATION_TO_CALLBACK[reporter.value]()
        if reporter is Reporter.TENSORBOARD:
            shows.logging_dir = str(run.logs)
        trainer.add_callback(shows)
    checkpoint = processes.on_main(run.newest) if resume else None
    try:
        trainer.train() if checkpoint is None else trainer.resume(checkpoint)
    except RuntimeError as error:
        if not processes.lost(error):
            raise
        raise HeadpruneError(
            f"Another of the {processes.count()} processes ended. {again}"
        ) from error
    if callback.interrupted:
        raise Interrupted(
            f"Stopped after step {trainer.state.global_step} of {trainer.args.max_steps}; a "
            f"checkpoint is in '{run.folder}'. {again}"
        )


@contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C sets; a second one ends the training at once."""
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
