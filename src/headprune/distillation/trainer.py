"""The student with its loss, and its Trainer."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune import processes
from headprune.config import HealConfig, HealOptimizer, HealTrain
from headprune.distillation.optimizer import MuonAndAdamW, matrices
from headprune.errors import HeadpruneError
from headprune.model.batch import Batch, inputs_of, without_labels
from headprune.model.embedding import head_of
from headprune.model.losses import LossModule, blended
from headprune.model.placement import reshard
from headprune.model.precision import to_float32
from headprune.runtime.modeling_headprune import Attention, RepeatingProjection
from headprune.training import ResumableTrainer

_LINEAR = 1e3  # weights of norms: about 1 where they are trained, 1e6 where eps makes them linear


class HealedModel(LossModule):
    """A student, and its teacher, which is no part of the module.

    Args:
        student: The model to train.
        teacher: The model to match.
        bf16: Compute in bfloat16 (autocast).

    Attributes:
        own: Weight of the student's own loss against the labels.
    """

    def __init__(self, student: nn.Module, teacher: PreTrainedModel, bf16: bool) -> None:
        super().__init__()
        self.model = student
        self._teacher = [teacher.requires_grad_(False).eval()]
        self._bf16 = bf16
        self._head = head_of(teacher)
        self.own = 0.0

    def forward(self, batch: Batch) -> Tensor:
        """Return the divergence of the student, blended with its own loss."""
        inputs = without_labels(batch)
        with torch.autocast(inputs_of(batch).device.type, torch.bfloat16, enabled=self._bf16):
            with torch.no_grad():
                wanted = self._teacher[0](**inputs)
                reshard(self._teacher[0])  # nothing that runs backwards would
            outputs = self.model(**(batch if self.own else inputs))
        return blended(outputs, wanted, batch, self._head, self.own)


class HealTrainer(ResumableTrainer):
    """Trainer that measures its loss on held-out text at its checkpoints.

    Args:
        rows: The sequences to choose by.
        optimizer: Muon or AdamW.
        **kwargs: Arguments of ``ResumableTrainer``.

    Attributes:
        logits: Sink logits, which move faster.
    """

    optimizer: torch.optim.Optimizer | None

    def __init__(self, rows: Dataset, optimizer: HealOptimizer, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rows = rows
        self.logits: list[nn.Parameter] = []
        self.muon = optimizer is HealOptimizer.MUON

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make Muon for matrices, where it was chosen; else Trainer's AdamW."""
        net = self.model.model
        by_muon = matrices(net) if self.muon else []
        if self.optimizer is None and (by_muon or self.logits):
            ids = {*map(id, by_muon), *map(id, self.logits)}
            rest = [p for p in net.parameters() if p.requires_grad and id(p) not in ids]
            self.optimizer = MuonAndAdamW(by_muon, rest, self.args.learning_rate, self.logits)
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        return optimizer

    def held_out(self, rows: Dataset | None = None) -> float:
        """Return the mean loss, of the sequences to choose by where none are given."""
        losses = self.row_losses(rows or self.rows)
        return processes.mean([fmean(losses)])[0]  # all processes must choose the same


def trainable(net: PreTrainedModel, attentions: list[Attention], config: HealConfig) -> nn.Module:
    """Set which weights move, and return the module to train.

    Raises:
        HeadpruneError: If LoRA cannot adapt the model.
    """
    torch.manual_seed(config.seed)  # low-rank additions begin with draws
    net.requires_grad_(config.train is HealTrain.ALL)
    fixed = _linear_norms(net)
    modules = {p.path: p.module for a in attentions for p in a.projections if p.module not in fixed}
    student: nn.Module = net
    if config.train is HealTrain.ATTENTION:
        for module in modules.values():
            module.requires_grad_(True)
    for module in fixed:
        module.requires_grad_(False)
    if config.train is not HealTrain.LORA:
        return student
    for path, module in modules.items():
        if isinstance(module, RepeatingProjection):
            raise HeadpruneError(
                f"--train lora cannot adapt '{path}', which repeats its output for heads that "
                "share. Use --train attention."
            )
    from peft import LoraConfig, get_peft_model

    names = "|".join(path.replace(".", r"\.") for path in modules)
    lora = LoraConfig(
        r=config.lora_rank, lora_alpha=2 * config.lora_rank, target_modules=rf"({names})"
    )
    adapted: nn.Module = get_peft_model(net, lora)
    return adapted


def _linear_norms(net: PreTrainedModel) -> list[nn.Module]:
    """Return norms that eps makes linear, as ``convert-mla`` writes, and what feeds them.

    Their inputs are about 1e-9, so that any step of an optimiser would erase them.
    """
    fixed: list[nn.Module] = []
    for module in net.modules():
        for of, named in (("q_a", "q_a_proj"), ("kv_a", "kv_a_proj_with_mqa")):
            norm = getattr(module, f"{of}_layernorm", None)
            if norm is not None and float(norm.weight.detach().abs().max()) > _LINEAR:
                fixed += [norm, module.get_submodule(named)]
    return fixed


def merged(trained: nn.Module, config: HealConfig) -> PreTrainedModel:
    """Return the plain model after training."""
    if config.train is HealTrain.LORA:
        from peft import PeftModel

        assert isinstance(trained, PeftModel)
        to_float32(trained.get_base_model())  # bfloat16 would round small updates away
        trained = trained.merge_and_unload()
    assert isinstance(trained, PreTrainedModel)
    return trained
