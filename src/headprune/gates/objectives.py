"""What gates are trained on.

An objective samples the gates and returns the loss of one batch. It is the only place that knows
when the model runs gated and when it does not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from headprune.gates.gates import Gates
from headprune.model.batch import Batch, without_labels
from headprune.model.embedding import Head
from headprune.model.losses import blended

Loss = Callable[[nn.Module, Gates, Batch], Tensor]
"""Computes the loss of one batch, gated: a scalar."""


def labelled(model: nn.Module, gates: Gates, batch: Batch) -> Tensor:
    """The model's own loss against ``batch["labels"]``: lm, mlm and task."""
    gates.sample(batch["input_ids"].shape[0])
    loss: Tensor = model(**batch).loss
    return loss


class Distillation:
    """Matches the ungated model (see ``divergence``).

    Args:
        head: What the model's outputs are for.
        teacher: The model to match; None for the trained model itself without gates, which holds
            as long as its weights are frozen and costs no memory.
        own: Share of the loss that is the model's own against the labels.
        bf16: Whether to compute in bfloat16 (autocast).
    """

    def __init__(
        self, head: Head, teacher: nn.Module | None = None, own: float = 0.0, bf16: bool = False
    ) -> None:
        self.head = head
        self.teacher = teacher
        self.own = own
        self.bf16 = bf16

    def __call__(self, model: nn.Module, gates: Gates, batch: Batch) -> Tensor:
        """The loss of the gated model, averaged over real tokens."""
        inputs = without_labels(batch)
        with torch.autocast(batch["input_ids"].device.type, torch.bfloat16, enabled=self.bf16):
            gates.disable()
            with torch.no_grad():
                wanted = (self.teacher or model)(**inputs)
            gates.sample(batch["input_ids"].shape[0])
            got = model(**(batch if self.own else inputs))
        return blended(got, wanted, batch, self.head, self.own)
