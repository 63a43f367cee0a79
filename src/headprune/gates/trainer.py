"""The gated model with its loss, and its Trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerState

from headprune import processes
from headprune.config import Train, TrainGatesConfig
from headprune.gates.gates import Gates
from headprune.gates.objectives import Loss
from headprune.gates.sparsity import Sparsity
from headprune.model.batch import Batch
from headprune.model.losses import LossModule
from headprune.runtime.modeling_headprune import Attention
from headprune.training import HistoryCallback, ResumableTrainer

_LEAST = 1e-8  # of a divergence: less is rounding


class GatedModel(LossModule):
    """A model, its gates, and the loss."""

    def __init__(self, model: PreTrainedModel, gates: Gates, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.gates = gates
        self._loss = loss
        self.config = model.config

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss of a batch, gated."""
        return self._loss(self.model, self.gates, batch)

    def trained_state(self) -> dict[str, Tensor]:
        """Return the gates and the trained weights, by name."""
        state = self.gates.state_dict() | {"chosen": self.gates.chosen}
        return super().trained_state() | {f"gates.{name}": state[name] for name in state}


def freeze(model: PreTrainedModel, attentions: list[Attention], train: Train) -> None:
    """Set which weights are trained."""
    model.requires_grad_(train is Train.ALL)
    if train is Train.ATTENTION:
        for attention in attentions:
            for projection in attention.projections:
                projection.module.requires_grad_(True)


def relative(divergence: Tensor) -> Tensor:
    """Return the log, by which rows and draws count alike: they differ by a hundred times."""
    return divergence.clamp(min=_LEAST).log()


class GateTrainer(ResumableTrainer):
    """Trainer with one learning rate for gates and one for weights.

    Args:
        config: Settings of the training.
        sparsity: What closes gates.
        choosing: Steps after which the heads are chosen, and weights train on; None for after all.
        rows: Rows that checkpoints are chosen by; None to take the last.
        model: The module to train.
        **kwargs: Arguments of ``ResumableTrainer``.

    Attributes:
        divergence: That of the choice of the last checkpoint, on ``rows``.
    """

    optimizer: torch.optim.Optimizer | None
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None

    def __init__(
        self,
        config: TrainGatesConfig,
        sparsity: Sparsity,
        choosing: int | None,
        rows: Dataset | None,
        model: GatedModel,
        **kwargs: Any,
    ) -> None:
        super().__init__(model=model, **kwargs)
        self.config = config
        self.sparsity = sparsity
        self.choosing = choosing
        self.rows = rows
        self.divergence: float | None = None
        self._known: dict[tuple[int, tuple[int, ...]], float] = {}  # a choice often stays

    @property
    def gates(self) -> Gates:
        """The gates of the model."""
        gates: Gates = self.model.gates
        return gates

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, **kwargs: Any
    ) -> Tensor:
        """Return the log of a divergence, or the model's own loss and the penalty of open gates."""
        loss = super().compute_loss(model, inputs)
        if self.config.l0_penalty is None:
            return relative(loss)
        return loss if self.gates.chosen else loss + self.sparsity.penalty(self.gates)

    def held_out(self) -> float | None:
        """Return the divergence of the present choice on the rows to choose by."""
        if self.rows is not None:
            self.divergence = self.divergence_of(self.sparsity.choice(self.gates), self.rows)
        return self.divergence

    def divergence_of(self, kept: list[int], rows: Dataset) -> float:
        """Return the divergence of rows with the gates of some units open, and no others.

        That is the geometric mean, for which a row that lost a fact counts no more than others.
        """
        if (known := self._known.get((id(rows), tuple(kept)))) is not None:
            return known
        with self.gates.choosing(kept):
            losses = self.row_losses(rows)
        # all processes must choose the same
        mean = processes.mean([fmean(math.log(max(loss, _LEAST)) for loss in losses)])[0]
        self._known[id(rows), tuple(kept)] = divergence = math.exp(mean)
        return divergence

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make AdamW: gates have no decay, and their own learning rate."""
        if self.optimizer is None:
            config = self.config
            weights = [p for p in self.model.model.parameters() if p.requires_grad]
            gates = {"params": [self.gates.log_alpha], "lr": config.gate_lr, "weight_decay": 0.0}
            groups = [gates, {"params": weights, "lr": config.weight_lr}] if weights else [gates]
            self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01)
        return self.optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clip the weights alone: one norm over all would tie them to the gates' gradients."""
        assert self.optimizer is not None
        norm = torch.zeros(())
        for group in self.optimizer.param_groups[1:]:
            norm = self.accelerator.clip_grad_norm_(group["params"], self.args.max_grad_norm)
        return norm

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Make a schedule: gates constant, weights linear to 0 once the heads are chosen."""
        if self.lr_scheduler is None:
            optimizer = optimizer or self.create_optimizer()
            left = max(1, num_training_steps - (self.choosing or 0))

            def settled(step: int) -> float:
                return min(1.0, max(0.0, (num_training_steps - step) / left))

            rates: list[Callable[[int], float]] = [lambda step: 1.0, settled]
            count = len(optimizer.param_groups)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates[:count])
        return self.lr_scheduler


class GateCallback(HistoryCallback):
    """After every optimiser step: correct, choose, record."""

    trainer: GateTrainer

    def record(self, state: TrainerState) -> dict[str, Any]:
        """Move the gates to the target, and choose heads when it is time.

        Returns:
            Beside the loss: the expected number of open heads (of windows, units), and the units
            whose gates are open with a probability between 0.1 and 0.9.
        """
        trainer, gates, step = self.trainer, self.trainer.gates, state.global_step
        finite = gates.log_alpha.isfinite().all()
        if not gates.chosen:
            trainer.sparsity.after_step(gates)
            if step == trainer.choosing and bool(finite):  # or the record is refused
                gates.choose(trainer.sparsity.choice(gates))
        gates.record(step, state.max_steps)
        undecided = (gates.open_probability() - 0.5).abs() < 0.4
        return {
            **super().record(state),
            "finite": finite,
            "expected_open": gates.expected_open(),
            "undecided": undecided.sum(),
        }

    def check(self, record: dict[str, Any]) -> None:
        """Refuse gates that are not finite."""
        super().check(record)
        if not record.pop("finite"):
            raise self.trainer.broken("the gates are not finite after", record["step"])

    def numbers(self, record: Mapping[str, Any]) -> str:
        """Return the text of the step in a progress bar."""
        units, divergence = len(self.trainer.gates.log_alpha), self.trainer.divergence
        decided = units - int(record["undecided"])
        held_out = "" if divergence is None else f" held out {divergence:.4f}"
        return f"loss {record['loss']:.4f}{held_out} decided {decided}/{units}"
