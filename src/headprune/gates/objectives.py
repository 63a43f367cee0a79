"""Objectives of gates: each samples the gates and returns the loss of one batch.

No other place knows when the model runs gated and when it does not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from headprune.gates.gates import Gates
from headprune.model.batch import Batch, inputs_of, without_labels
from headprune.model.embedding import Head
from headprune.model.losses import divergence

Loss = Callable[[nn.Module, Gates, Batch], Tensor]
"""Computes the loss of one batch, gated: a scalar."""


def labelled(model: nn.Module, gates: Gates, batch: Batch) -> Tensor:
    """Return the model's own loss against ``batch["labels"]``, as Voita et al. 2019 train."""
    gates.sample(len(inputs_of(batch)))
    loss: Tensor = model(**batch).loss
    return loss


class Distillation:
    """Divergence from the ungated model (see ``model.losses``).

    Its slope by an open gate is zero, while that of the model's own loss is noise (Fisher's
    identity): only the effect of the heads is left.

    Args:
        head: Head of the model.
        teacher: The model to match; None for the trained model itself without gates, if its
            weights are frozen: that takes no memory.
    """

    def __init__(self, head: Head, teacher: nn.Module | None = None) -> None:
        self.head = head
        self.teacher = teacher

    def __call__(self, model: nn.Module, gates: Gates, batch: Batch) -> Tensor:
        """Return the loss of the gated model, averaged over real tokens."""
        inputs = without_labels(batch)
        gates.disable()
        with torch.no_grad():
            wanted = (self.teacher or model)(**inputs)
        gates.sample(len(inputs_of(batch)))
        return divergence(model(**inputs), wanted, batch, self.head)
