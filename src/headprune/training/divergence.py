"""How far a model's outputs are from another's."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from headprune.model.batch import Batch

OWN_SHARE = 0.5  # of a language model's own loss, where it is trained on both; the most


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


def own_share(before: float) -> float:
    """Share of a language model's own loss where it begins ``before`` nats from the original.

    What is near the original has little to catch up on, and would learn the text beside.
    """
    return min(OWN_SHARE, before)


def blended(got: Any, wanted: Any, batch: Batch, own: float) -> Tensor:
    """The divergence of a model's outputs from another's, a share of it replaced by its own loss.

    As in Hinton et al. 2015 (arXiv:1503.02531, section 2), at a temperature of 1.
    """
    loss = divergence(got, wanted, batch)
    return torch.lerp(loss, got.loss.to(loss), own) if own else loss


def kl_divergence(
    logits: Float[Tensor, "batch length classes"],
    target: Float[Tensor, "batch length classes"],
    mask: Tensor,
) -> Float[Tensor, ""]:
    """KL(target || logits) in nats, averaged over the positions where ``mask`` is not 0."""
    log_p = F.log_softmax(target.float(), dim=-1)
    log_q = F.log_softmax(logits.float(), dim=-1)
    per_position = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    mask = mask.to(logits.device)
    return (per_position * mask).sum() / mask.sum()


def relative_error(
    states: Float[Tensor, "batch length hidden"],
    target: Float[Tensor, "batch length hidden"],
    mask: Tensor,
) -> Float[Tensor, ""]:
    """Squared error over squared norm of the target, over the positions where ``mask`` is not 0."""
    weight = mask[..., None].to(states.device, torch.float32)
    error = ((states.float() - target.float()) ** 2 * weight).sum()
    norm: Tensor = (target.float() ** 2 * weight).sum()
    return error / norm
