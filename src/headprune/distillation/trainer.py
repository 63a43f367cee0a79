"""Healing: a smaller model learns to match the one it came from, on plain text."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.config import HealConfig, HealOptimizer, HealTrain
from headprune.distillation.optimizer import MuonAndAdamW, matrices
from headprune.errors import HeadpruneError
from headprune.model.batch import Batch, without_labels
from headprune.model.embedding import head_of
from headprune.model.losses import LossModule, blended
from headprune.model.placement import on_device, reshard
from headprune.packages import refuse_missing
from headprune.runtime.modeling_headprune import Attention, RepeatingProjection
from headprune.training import ResumableTrainer


class HealedModel(LossModule):
    """A student, and the teacher it is measured against; the teacher is no part of the module.

    Args:
        student: What is trained.
        teacher: The model to match.
        bf16: Whether to compute in bfloat16 (autocast).

    Attributes:
        own: Share of the loss in training that is the student's own against the labels; 0 at first.
    """

    def __init__(self, student: nn.Module, teacher: PreTrainedModel, bf16: bool) -> None:
        super().__init__()
        self.model = student
        self._teacher = [teacher.requires_grad_(False).eval()]
        self._bf16 = bf16
        self._head = head_of(teacher)
        self.own = 0.0

    def forward(self, batch: Batch) -> Tensor:
        """Divergence of the student from the teacher, and in training its own loss."""
        inputs, own = without_labels(batch), self.own if self.training else 0.0
        with torch.autocast(batch["input_ids"].device.type, torch.bfloat16, enabled=self._bf16):
            with torch.no_grad():
                wanted = self._teacher[0](**inputs)
                reshard(self._teacher[0])  # nothing that runs backwards would
            got = self.model(**(batch if own else inputs))
        return blended(got, wanted, batch, self._head, own)


class HealTrainer(ResumableTrainer):
    """Trainer on the divergence from a teacher, which is measured at every checkpoint.

    Args:
        rows: Rows that are not trained on, and choose the checkpoint.
        optimizer: What moves the weights.
        **kwargs: As for Trainer.
    """

    optimizer: torch.optim.Optimizer | None

    def __init__(self, rows: Dataset, optimizer: HealOptimizer, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rows = rows
        muon = optimizer is HealOptimizer.MUON
        self.matrices = {id(w): w for w in (matrices(self.model.model) if muon else ())}

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Muon for matrices, where it was chosen; else Trainer's AdamW."""
        if self.optimizer is None and self.matrices:
            moving = [p for p in self.model.model.parameters() if p.requires_grad]
            others = [p for p in moving if id(p) not in self.matrices]
            matrices = list(self.matrices.values())
            self.optimizer = MuonAndAdamW(matrices, others, self.args.learning_rate)
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        return optimizer

    @torch.no_grad()
    def held_out(self, rows: Dataset | None = None) -> float:
        """Mean divergence over some rows; without them, over those that choose."""
        self.model.eval()
        losses = [
            float(self.model(on_device(self.model, self.data_collator([row]))))
            for row in rows or self.rows
        ]
        reshard(self.model)
        self.model.train()
        return fmean(losses)

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, **kwargs: Any
    ) -> Tensor:
        """The divergence of a batch."""
        loss: Tensor = model(inputs)
        self.last_loss = loss.item()
        return loss


def refuse_without_peft(config: HealConfig) -> None:
    """Refuses low-rank additions where what makes them is not installed.

    Raises:
        HeadpruneError: Saying how to install it.
    """
    if config.train is HealTrain.LORA:
        refuse_missing("--train lora", "peft")


def trainable(net: PreTrainedModel, attentions: list[Attention], config: HealConfig) -> nn.Module:
    """Lets move what is to be trained, and returns the module to train.

    Raises:
        HeadpruneError: If LoRA is asked for and cannot adapt the model.
    """
    torch.manual_seed(config.seed)  # low-rank additions begin with draws
    net.requires_grad_(config.train is HealTrain.ALL)
    modules = {p.path: p.module for a in attentions for p in a.projections}
    if config.train is HealTrain.ATTENTION:
        for module in modules.values():
            module.requires_grad_(True)
    student: nn.Module = net
    repeating = [
        path for path, module in modules.items() if isinstance(module, RepeatingProjection)
    ]
    if config.train is HealTrain.LORA and repeating:
        raise HeadpruneError(
            f"--train lora cannot adapt '{repeating[0]}', which repeats its output for heads that "
            "share. Use --train attention."
        )
    if config.train is not HealTrain.LORA:
        return student
    from peft import LoraConfig, get_peft_model

    names = "|".join(path.replace(".", r"\.") for path in modules)
    lora = LoraConfig(
        r=config.lora_rank, lora_alpha=2 * config.lora_rank, target_modules=rf"({names})"
    )
    adapted: nn.Module = get_peft_model(net, lora)
    return adapted


def merged(trained: nn.Module, config: HealConfig) -> PreTrainedModel:
    """The plain model after training."""
    if config.train is HealTrain.LORA:
        from peft import PeftModel

        assert isinstance(trained, PeftModel)
        trained = trained.merge_and_unload()
    assert isinstance(trained, PreTrainedModel)
    return trained
