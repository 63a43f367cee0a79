"""What is trained: a module around a model that gives the loss of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from headprune.model.placement import is_sharded
from headprune.tensors.shards import split_as


class LossModule(nn.Module):
    """What a ``ResumableTrainer`` trains: a module that gives the loss of a batch."""

    accepts_loss_kwargs = False  # tells Trainer that losses are means over the batch
    model: nn.Module

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        """Whether the model is in shards; Trainer asks, and averages the gradients beside them."""
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
        """The tensors that move, by their names in this module."""
        moving = ((n, p.detach()) for n, p in self.named_parameters() if p.requires_grad)
        return {name: tensor.contiguous() for name, tensor in moving}

    def take(self, trained: Mapping[str, Tensor]) -> None:
        """Takes over such tensors; those of one that is in shards are given whole."""
        own = self.state_dict()
        parts = {name: split_as(tensor, own[name]) for name, tensor in trained.items()}
        self.load_state_dict(parts, strict=False)


def recompute_activations(model: PreTrainedModel) -> None:
    """Enable gradient checkpointing for a model that stays in eval mode.

    A layer recomputes only while it is in training mode, and functional dropout reads the same
    flag. So the layer is put into eval mode for as long as its forward runs.
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
