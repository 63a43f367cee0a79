"""Losses of a training: divergence from a teacher, and the module that Trainer trains."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from headprune.model.batch import Batch, Task, inputs_of
from headprune.model.embedding import Head, tokens_seen
from headprune.model.placement import is_sharded

_POSITIONS = 256  # per step of the divergence
OWN_SHARE = 0.5  # largest weight of a language model's own loss beside the divergence

# outputs of heads without "logits"
_OTHER_LOGITS = (
    "start_logits",
    "end_logits",
    "prediction_logits",
    "seq_relationship_logits",
    "sop_logits",
)


def divergence(got: Any, wanted: Any, batch: Batch, head: Head) -> Tensor:
    """Return the divergence of a model's outputs from another's, averaged over real tokens.

    Numbers are compared by squared error, classes by KL, independent labels by a KL each. Last
    hidden states of a model without a head are compared by relative error where its embedding
    reads them.

    Args:
        got: The outputs of the model.
        wanted: The outputs of the model to match.
        batch: The inputs of both.
        head: The head of the model.
    """
    mask = batch.get("attention_mask", torch.ones_like(inputs_of(batch).flatten(1)))
    if "input_ids" not in batch:  # positions are not those of pixels and samples
        states = got.get("logits", got.get("last_hidden_state"))
        mask = torch.ones(states.shape[:2], device=states.device)
    if head.task == "causal-lm" and "labels" in batch:
        mask = F.pad((batch["labels"][:, 1:] != -100).long(), (0, 1))  # of the token to predict
    if "decoder_input_ids" in batch:  # then the logits are those of the target
        mask = (batch["labels"] != -100).long()
    if "logits" in got:
        return _of_logits(got.logits, wanted.logits, mask, head.task)
    parts = [name for name in _OTHER_LOGITS if name in got]
    if parts:
        return torch.stack([_of_logits(got[n], wanted[n], mask, head.task) for n in parts]).sum()
    return relative_error(
        got.last_hidden_state, wanted.last_hidden_state, tokens_seen(mask, head.pooling)
    )


def _of_logits(logits: Tensor, target: Tensor, mask: Tensor, task: Task) -> Tensor:
    if task == "regression":
        return F.mse_loss(logits.float(), target.float())
    if task == "multi-label":
        return _binary_kl(logits, target).sum(-1).mean()
    if logits.dim() == 3:  # classes of every token
        return kl_divergence(logits, target, mask)
    if task == "question-answering":  # a class is a place
        padding = mask.to(logits.device) == 0
        least = torch.finfo(torch.float32).min
        logits, target = (x.float().masked_fill(padding, least) for x in (logits, target))
    elif task == "pre-training" and logits.shape == mask.shape:  # real or replaced, of every token
        mask = mask.to(logits.device)
        return (_binary_kl(logits, target) * mask).sum() / mask.sum()
    return kl_divergence(logits[:, None], target[:, None], torch.ones_like(mask[:, :1]))


def _binary_kl(logits: Tensor, target: Tensor) -> Tensor:
    """Return the KL of each pair of log-odds."""
    logits, target = logits.float(), target.float()
    entropy = F.binary_cross_entropy_with_logits(target, target.sigmoid(), reduction="none")
    return F.binary_cross_entropy_with_logits(logits, target.sigmoid(), reduction="none") - entropy


def own_share(before: float) -> float:
    """Return the weight of a language model's own loss, ``before`` nats from its original.

    A model near its original has little to recover, and would learn the text instead.
    """
    return min(OWN_SHARE, before)


def blended(got: Any, wanted: Any, batch: Batch, head: Head, own: float) -> Tensor:
    """Return the divergence, blended with the model's own loss by the weight ``own``.

    As in Hinton et al. 2015 (arXiv:1503.02531, section 2), at a temperature of 1.
    """
    loss = divergence(got, wanted, batch, head)
    return torch.lerp(loss, got.loss.to(loss), own) if own else loss


def kl_divergence(
    logits: Float[Tensor, "batch length classes"],
    target: Float[Tensor, "batch length classes"],
    mask: Tensor,
) -> Float[Tensor, ""]:
    """Return KL(target || logits) in nats, averaged over the positions where ``mask`` is not 0."""

    def of_each(target: Tensor, logits: Tensor) -> Tensor:
        log_p, log_q = (F.log_softmax(x.float(), dim=-1) for x in (target, logits))
        return F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)

    # copies in float32 are as large as the vocabulary: of some positions at a time, made again for
    # the gradient
    parts = zip(target.split(_POSITIONS, 1), logits.split(_POSITIONS, 1), strict=True)
    again = partial(checkpoint, of_each, use_reentrant=False, preserve_rng_state=False)
    per_position = torch.cat([again(*part) for part in parts], 1)
    mask = mask.to(logits.device)
    return (per_position * mask).sum() / mask.sum()


def relative_error(
    states: Float[Tensor, "batch length hidden"],
    target: Float[Tensor, "batch length hidden"],
    mask: Tensor,
) -> Float[Tensor, ""]:
    """Return squared error over squared norm of the target, where ``mask`` is not 0."""
    weight = mask[..., None].to(states.device, torch.float32)
    error = ((states.float() - target.float()) ** 2 * weight).sum()
    norm: Tensor = (target.float() ** 2 * weight).sum()
    return error / norm


class LossModule(nn.Module):
    """A model with its loss, as Trainer trains it."""

    accepts_loss_kwargs = False  # losses are means over the batch
    model: nn.Module

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        """True if the model is in shards; Trainer then averages the gradients beside them."""
        return is_sharded(self.model)

    def train(self, mode: bool = True) -> LossModule:
        """Train the model in eval mode, so that it computes as at test time.

        With dropout a model would differ from an equal teacher, and from itself without gates.
        """
        super().train(mode)
        self.model.eval()
        for layer in _recomputing(self.model):
            layer.training = mode
        return self

    def trained_state(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by name; they share their memory."""
        return {name: p.detach() for name, p in self.named_parameters() if p.requires_grad}


def recompute_activations(model: PreTrainedModel) -> None:
    """Enable gradient checkpointing for a model that stays in eval mode.

    A layer recomputes only in training mode, and functional dropout reads the same flag. So the
    layer is in eval mode while its forward runs.
    """
    # renamed in transformers 5.2x; the old name warns there and is the only one before
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    for layer in _recomputing(model):
        recompute = partial(_in_eval, layer, layer._gradient_checkpointing_func)
        layer._gradient_checkpointing_func = recompute


def _in_eval(
    layer: nn.Module, checkpoint: Callable[..., Any], forward: Callable[..., Any], *args: Any
) -> Any:
    def evaluated(*inputs: Any) -> Any:
        training, layer.training = layer.training, False
        try:
            return forward(*inputs)
        finally:
            layer.training = training

    return checkpoint(evaluated, *args)


def _recomputing(model: nn.Module) -> list[GradientCheckpointingLayer]:
    layers = (m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))
    return [layer for layer in layers if layer.gradient_checkpointing]
