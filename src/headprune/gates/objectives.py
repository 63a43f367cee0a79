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
from headprune.training.divergence import divergence

Loss = Callable[[nn.Module, Gates, Batch], Tensor]
"""Computes the loss of one batch, gated: a scalar."""


def labelled(model: nn.Module, gates: Gates, batch: Batch) -> Tensor:
    """The model's own loss against ``batch["labels"]``: lm, mlm and task."""
    gates.sample(batch["input_ids"].shape[0])
    loss: Tensor = model(**batch).loss
    return loss


class Distillation:
    """Matches the ungated model: KL on logits, or the last hidden states where there is no head.

    Args:
        teacher: The model to match; None for the trained model itself without gates, which holds
            as long as its weights are frozen and costs no memory.
    """

    def __init__(self, teacher: nn.Module | None = None) -> None:
        self.teacher = teacher

    def __call__(self, model: nn.Module, gates: Gates, batch: Batch) -> Tensor:
        """Divergence of the gated model from the teacher, averaged over real tokens."""
        inputs = without_labels(batch)
        gates.disable()
        with torch.no_grad():
            wanted = (self.teacher or model)(**inputs)
        gates.sample(batch["input_ids"].shape[0])
        return divergence(model(**inputs), wanted, batch)
