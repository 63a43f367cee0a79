"""What gates are trained on.

An objective samples the gates and returns the loss of one batch. It is the only place that knows
when the model runs gated and when it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from headprune.data.batch import Batch, without_labels
from headprune.training.gates import Gates

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
        if self.teacher is not None:
            self.teacher.to(batch["input_ids"].device)
        with torch.no_grad():
            wanted = (self.teacher or model)(**inputs)
        gates.sample(batch["input_ids"].shape[0])
        return divergence(model(**inputs), wanted, batch)


def divergence(got: Any, wanted: Any, batch: Batch) -> Tensor:
    """How far a model's outputs are from another's, averaged over real tokens.

    KL on logits, or the relative error of the last hidden states where there are none.
    """
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    if "decoder_input_ids" in batch:  # then the logits are those of the target
        mask = (batch["labels"] != -100).long()
    if "logits" in got:
        logits, target = got.logits, wanted.logits
        if logits.dim() == 2:  # one row of class logits per sequence
            return kl_divergence(logits[:, None], target[:, None], torch.ones_like(mask[:, :1]))
        return kl_divergence(logits, target, mask)
    return relative_error(got.last_hidden_state, wanted.last_hidden_state, mask)


def kl_divergence(
    logits: Float[Tensor, "batch length classes"],
    target: Float[Tensor, "batch length classes"],
    mask: Tensor,
) -> Float[Tensor, ""]:
    """KL(target || logits) in nats, averaged over the positions where ``mask`` is not 0."""
    log_p = F.log_softmax(target.float(), dim=-1)
    log_q = F.log_softmax(logits.float(), dim=-1)
    per_position = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    return (per_position * mask).sum() / mask.sum()


def relative_error(
    states: Float[Tensor, "batch length hidden"],
    target: Float[Tensor, "batch length hidden"],
    mask: Tensor,
) -> Float[Tensor, ""]:
    """Squared error over squared norm of the target, over the positions where ``mask`` is not 0."""
    weight = mask[..., None].float()
    error = ((states.float() - target.float()) ** 2 * weight).sum()
    norm: Tensor = (target.float() ** 2 * weight).sum()
    return error / norm
