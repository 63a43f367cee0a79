"""The gated model with its loss, and its Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerState

from headprune.config import Train, TrainGatesConfig
from headprune.gates.gates import Gates
from headprune.gates.objectives import Loss
from headprune.gates.optimizer import GateOptimizer
from headprune.gates.sparsity import Sparsity
from headprune.model.batch import Batch
from headprune.model.losses import LossModule
from headprune.runtime.modeling_headprune import Attention
from headprune.training import HistoryCallback, ResumableTrainer


class GatedModel(LossModule):
    """A model, its gates, and the loss.

    Attributes:
        refitted: Weights that change before the first step, and not after it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        gates: Gates,
        loss: Loss,
        refitted: Sequence[nn.Parameter] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.gates = gates
        self.refitted = refitted
        self._loss = loss
        self.config = model.config

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss of a batch, gated."""
        return self._loss(self.model, self.gates, batch)

    def trained_state(self) -> dict[str, Tensor]:
        """Return the gates, and the trained or refitted weights, by name."""
        refitted = set(map(id, self.refitted))
        weights = {n: p.detach() for n, p in self.named_parameters() if id(p) in refitted}
        state = self.gates.state_dict() | {"chosen": self.gates.chosen}
        gates = {f"gates.{name}": tensor for name, tensor in state.items()}
        return super().trained_state() | weights | gates


def freeze(model: PreTrainedModel, attentions: list[Attention], train: Train) -> None:
    """Set which weights are trained."""
    model.requires_grad_(train is Train.ALL)
    if train is Train.ATTENTION:
        for attention in attentions:
            for projection in attention.projections:
                projection.module.requires_grad_(True)


def settled_rate(step: int, choosing: int, steps: int) -> float:
    """Return the factor of a learning rate: 1 while heads are chosen, then linear to 0."""
    return 1.0 if step < choosing else max(0.0, 1 - (step - choosing) / max(1, steps - choosing))


class GateTrainer(ResumableTrainer):
    """Trainer with one learning rate for gates and one for weights.

    Args:
        config: Settings of the training.
        sparsity: What closes gates.
        choosing: Steps after which the heads are chosen.
        model: The module to train.
        **kwargs: Arguments of ``ResumableTrainer``.
    """

    optimizer: torch.optim.Optimizer | None
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None

    def __init__(
        self,
        config: TrainGatesConfig,
        sparsity: Sparsity,
        choosing: int,
        model: GatedModel,
        **kwargs: Any,
    ) -> None:
        super().__init__(model=model, **kwargs)
        self.config = config
        self.sparsity = sparsity
        self.choosing = choosing

    @property
    def gates(self) -> Gates:
        """The gates of the model."""
        gates: Gates = self.model.gates
        return gates

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, **kwargs: Any
    ) -> Tensor:
        """Return the loss plus the penalty of open gates."""
        loss: Tensor = model(inputs)
        self.step_loss = loss.detach()
        return loss if self.gates.chosen else loss + self.sparsity.penalty(self.gates)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make a ``GateOptimizer``."""
        if self.optimizer is None:
            config, gates = self.config, self.gates
            weights = [p for p in self.model.model.parameters() if p.requires_grad]
            rates = config.gate_lr, config.scale_lr, config.weight_lr
            self.optimizer = GateOptimizer(gates.log_alpha, gates.scale, weights, *rates)
        return self.optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clip factors and weights, each group by itself; ``GateOptimizer`` bounds the gates.

        One norm over all would tie the step of every gate to the largest gradient of a weight.
        """
        assert self.optimizer is not None
        norms = [
            self.accelerator.clip_grad_norm_(group["params"], self.args.max_grad_norm)
            for group in self.optimizer.param_groups[1:]
            if any(parameter.grad is not None for parameter in group["params"])
        ]
        return torch.stack(norms).norm() if norms else torch.zeros(())

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Make a schedule: gates constant, the rest linear to 0 once the heads are chosen."""
        if self.lr_scheduler is None:
            optimizer = optimizer or self.create_optimizer()
            count = len(optimizer.param_groups)
            settled = partial(settled_rate, choosing=self.choosing, steps=num_training_steps)
            rates: list[Callable[[int], float]] = [lambda step: 1.0, settled, settled]
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates[:count])
        return self.lr_scheduler


class GateCallback(HistoryCallback):
    """After every optimiser step: correct, choose, record."""

    trainer: GateTrainer

    def record(self, state: TrainerState) -> dict[str, Any]:
        """Move the gates to the target, and choose heads when it is time.

        Returns:
            Beside the loss: the expected number of open query heads, the target at this step (None
            with a constant penalty), and whether the heads are chosen ("settled").
        """
        trainer, gates, step = self.trainer, self.trainer.gates, state.global_step
        finite = gates.log_alpha.isfinite().all() & gates.scale.isfinite().all()
        done = min(1.0, step / max(1, trainer.choosing))
        if not gates.chosen:
            trainer.sparsity.after_step(gates, done)
            if step >= trainer.choosing and bool(finite):  # or the record is refused
                gates.choose(trainer.sparsity.choice(gates))
        return {
            **super().record(state),
            "finite": finite,
            "expected_heads": gates.expected_heads(),
            "target_heads": trainer.sparsity.target(done),
            "settled": bool(gates.chosen),
        }

    def check(self, record: dict[str, Any]) -> None:
        """Refuse gates that are not finite."""
        super().check(record)
        if not record.pop("finite"):
            raise self.trainer.broken("the gates are not finite after", record["step"])

    def numbers(self, record: Mapping[str, Any]) -> str:
        """Return the loss and the open heads for a progress bar."""
        target = record["target_heads"]
        of = "" if target is None else f"/{target:.0f}"
        phase = " settled" if record["settled"] else ""
        return f"loss {record['loss']:.3f} heads {record['expected_heads']:.1f}{of}{phase}"
