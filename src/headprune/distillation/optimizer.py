"""The optimiser of healing: Muon for the matrices of the layers, AdamW for all else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import overload

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from headprune import devices
from headprune.config import HealConfig, HealOptimizer, HealTrain
from headprune.errors import HeadpruneError
from headprune.placements import in_shards

USUAL_RATE = {HealOptimizer.MUON: 2e-4, HealOptimizer.ADAMW: 1e-4}
LOGIT_RATE = 250  # a logit moves by units, a weight by hundredths


def resolved(config: HealConfig) -> HealConfig:
    """Return the configuration with optimiser and learning rate for this device.

    Muon orthogonalises in bfloat16, which is slow where a device only emulates it, and takes
    whole matrices, so neither shards nor low-rank additions.

    Raises:
        HeadpruneError: If Muon is chosen and not possible.
    """
    known, chosen = hasattr(torch.optim, "Muon"), config.optimizer
    if chosen is HealOptimizer.MUON and not known:
        raise HeadpruneError(
            f"--config optimizer=muon needs torch 2.9 or newer, and this is {torch.__version__}. "
            "Install that, or use --config optimizer=adamw."
        )
    if chosen is HealOptimizer.MUON and in_shards():
        raise HeadpruneError(
            "--config optimizer=muon takes matrices whole, and --shard splits them. Use optimizer "
            "adamw, or leave out --shard."
        )
    if chosen is HealOptimizer.AUTO:
        split = in_shards() or config.train is HealTrain.LORA
        fit = known and not split and devices.computes_bfloat16()
        chosen = HealOptimizer.MUON if fit else HealOptimizer.ADAMW
    rate = USUAL_RATE[chosen] if config.learning_rate is None else config.learning_rate
    return config.model_copy(update={"optimizer": chosen, "learning_rate": rate})


def matrices(net: PreTrainedModel) -> list[nn.Parameter]:
    """Return the trained weights of linear layers, without embeddings."""
    linear = {id(m.weight) for m in net.modules() if isinstance(m, (nn.Linear, Conv1D))}
    known = [net.get_output_embeddings()]
    with suppress(NotImplementedError):  # sound has none
        known.append(net.get_input_embeddings())
    embeddings = {id(m.weight) for m in known if hasattr(m, "weight")}  # of patches, a convolution
    moving = (weight for weight in net.parameters() if weight.requires_grad)
    return [w for w in moving if w.dim() == 2 and id(w) in linear - embeddings]


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for matrices and AdamW for other weights, as one optimiser.

    Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) replaces the momentum of a matrix
    by the nearest one with orthogonal columns or rows; scaled by ``0.2 sqrt(max(rows, columns))``
    its steps are as large as those of AdamW at the same learning rate (Liu et al. 2025,
    arXiv:2502.16982).

    Args:
        matrices: Weights of two dimensions.
        others: All other weights.
        learning_rate: Learning rate of both.
        logits: Sink logits, of a rate ``LOGIT_RATE`` times as large.
    """

    def __init__(
        self,
        matrices: list[nn.Parameter],
        others: list[nn.Parameter],
        learning_rate: float,
        logits: Sequence[nn.Parameter] = (),
    ) -> None:
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            self._parts.append(
                torch.optim.Muon(
                    matrices,
                    lr=learning_rate,
                    weight_decay=0.0,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        for weights, rate in ((others, learning_rate), ([*logits], LOGIT_RATE * learning_rate)):
            if weights:
                self._parts.append(torch.optim.AdamW(weights, lr=rate, weight_decay=0.0))
        groups = [group for part in self._parts for group in part.param_groups]
        super().__init__(groups, {})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make a step of both, on the groups and the state of this optimiser."""
        loss = None if closure is None else closure()
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state
            part.step()
        return loss
