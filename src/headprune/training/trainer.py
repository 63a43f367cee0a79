"""Gate training on transformers.Trainer: what is optimised, when gates settle, what is saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint

from headprune.config import Train, TrainGatesConfig
from headprune.runtime.modeling_headprune import Attention
from headprune.training.gates import Gates
from headprune.training.objectives import Batch, Loss
from headprune.training.optimizer import GateOptimizer
from headprune.training.rounds import Round, round_at
from headprune.training.sparsity import Sparsity

TRAINED = "trained.safetensors"


@dataclass(frozen=True)
class StepRecord:
    """One line of the history.

    Attributes:
        step: Optimiser steps done.
        steps: Optimiser steps in all.
        loss: The objective's loss of this step, without the penalty.
        expected_heads: Expected number of open query heads.
        target_heads: The number asked for at this step; None with a constant penalty.
        settled: Whether the heads are chosen.
    """

    step: int
    steps: int
    loss: float
    expected_heads: float
    target_heads: float | None
    settled: bool


class GatedModel(nn.Module):
    """A model, its gates, and the loss they are trained on."""

    accepts_loss_kwargs = False  # tells Trainer that losses are means over the batch

    def __init__(self, model: PreTrainedModel, gates: Gates, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.gates = gates
        self._loss = loss
        self.config = model.config

    def forward(self, batch: Batch) -> Tensor:
        """The loss of a batch, gated."""
        return self._loss(self.model, self.gates, batch)

    def train(self, mode: bool = True) -> GatedModel:
        """Frozen models stay in eval mode: dropout would only blur what a gate does."""
        super().train(mode)
        if mode and not any(p.requires_grad for p in self.model.parameters()):
            self.model.eval()
            for module in self.model.modules():
                if isinstance(module, GradientCheckpointingLayer):
                    module.training = True  # a layer recomputes only while it says it is training
        return self

    def trained_state(self) -> dict[str, Tensor]:
        """Gates, and the weights that move, by their names in this module."""
        state = {f"gates.{name}": value for name, value in self.gates.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                state[f"model.{name}"] = parameter.detach()
        return {name: value.contiguous() for name, value in state.items()}


def freeze(model: PreTrainedModel, attentions: list[Attention], train: Train) -> None:
    """Lets the weights move that ``train`` names, and no others."""
    model.requires_grad_(train is Train.ALL)
    if train is Train.ATTENTION:
        for attention in attentions:
            for projection in attention.projections:
                projection.module.requires_grad_(True)


class GateTrainer(Trainer):  # type: ignore[misc]
    """Trainer with one learning rate for gates and one for weights, and small checkpoints."""

    optimizer: torch.optim.Optimizer | None
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None

    def __init__(
        self,
        config: TrainGatesConfig,
        sparsity: Sparsity,
        rounds: list[Round],
        model: GatedModel,
        **kwargs: Any,
    ) -> None:
        super().__init__(model=model, **kwargs)
        self.remove_callback(PrinterCallback)  # progress is on_step's business
        self.gate_config = config
        self.sparsity = sparsity
        self.rounds = rounds
        self.last_loss = float("nan")

    @property
    def gates(self) -> Gates:
        gates: Gates = self.model.gates
        return gates

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, **kwargs: Any
    ) -> Tensor:
        """The objective plus the penalty of open gates."""
        loss: Tensor = model(inputs)
        self.last_loss = loss.item()
        return loss if self.gates.chosen else loss + self.sparsity.penalty(self.gates)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Gates with a common scale, the rest with AdamW (see ``GateOptimizer``)."""
        if self.optimizer is None:
            config, gates = self.gate_config, self.gates
            weights = [p for p in self.model.model.parameters() if p.requires_grad]
            rates = config.gate_lr, config.scale_lr, config.weight_lr
            self.optimizer = GateOptimizer(gates.log_alpha, gates.scale, weights, *rates)
        return self.optimizer

    def forget_gate_moments(self) -> None:
        """Lets the optimiser start anew with gates and factors, as their losses are new."""
        assert self.optimizer is not None
        for parameter in (self.gates.log_alpha, self.gates.scale):
            self.optimizer.state.pop(parameter, None)

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Gates constant; factors linear to zero at the end of every round, weights of the last."""
        if self.lr_scheduler is None:
            optimizer = optimizer or self.create_optimizer()
            rates = [
                lambda step: 1.0,
                lambda step: round_at(self.rounds, step).settled_rate(step),
                lambda step: self.rounds[-1].settled_rate(step),
            ]
            count = len(optimizer.param_groups)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates[:count])
        return self.lr_scheduler

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.model.trained_state(), folder / TRAINED)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        state = load_file(Path(resume_from_checkpoint) / TRAINED)
        self.model.load_state_dict(state, strict=False)


class GateCallback(TrainerCallback):  # type: ignore[misc]
    """After every optimiser step: correct, choose, record.

    Args:
        trainer: The trainer it serves.
        history: JSONL file that gets one record per step.
        on_step: Called with every record.
        should_stop: Asked after every step; True saves a checkpoint and ends the training.
    """

    def __init__(
        self,
        trainer: GateTrainer,
        history: Path,
        on_step: Callable[[StepRecord], None],
        should_stop: Callable[[], bool],
    ) -> None:
        self.trainer = trainer
        self.history = history
        self.on_step = on_step
        self.should_stop = should_stop
        self.interrupted = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drops records of steps after the checkpoint that the run goes on from."""
        lines = self.history.read_text().splitlines() if self.history.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= state.global_step]
        self.history.write_text("".join(f"{line}\n" for line in kept))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Moves the gates to the target; chooses heads, and begins rounds, when it is time."""
        trainer, gates, step = self.trainer, self.trainer.gates, state.global_step
        now = round_at(trainer.rounds, step - 1)
        if not gates.chosen:
            trainer.sparsity.after_step(gates, now, step)
            if step >= now.choose:
                gates.choose(trainer.sparsity.choice(gates, now))
        target = trainer.sparsity.target(gates, now, step)
        record = StepRecord(
            step=state.global_step,
            steps=state.max_steps,
            loss=trainer.last_loss,
            expected_heads=gates.expected_heads().item(),
            target_heads=target,
            settled=bool(gates.chosen),
        )
        if step == now.end and now is not trainer.rounds[-1]:
            gates.reopen()
            trainer.forget_gate_moments()
        with self.history.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")
        self.on_step(record)
        if self.should_stop():
            self.interrupted = True
            control.should_save = True
            control.should_training_stop = True


def training_arguments(config: TrainGatesConfig, folder: Path, steps: int) -> TrainingArguments:
    """Trainer's settings for a gates run."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=config.batch_size,
        # clipping would tie the step of every gate to the largest gradient among them
        max_grad_norm=0.0 if config.train is Train.GATES else 1.0,
        seed=config.seed,
        save_strategy="steps",
        save_steps=config.save_every or max(1, steps // 10),
        save_total_limit=2,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
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
