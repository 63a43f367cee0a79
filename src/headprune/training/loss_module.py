"""What is trained: a module around a model that gives the loss of a batch."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
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

    def trained_state(self) -> dict[str, Tensor]:
        """The tensors that move, by their names in this module."""
        moving = ((n, p.detach()) for n, p in self.named_parameters() if p.requires_grad)
        return {name: tensor.contiguous() for name, tensor in moving}

    def take(self, trained: Mapping[str, Tensor]) -> None:
        """Takes over such tensors; those of one that is in shards are given whole."""
        own = self.state_dict()
        parts = {name: split_as(tensor, own[name]) for name, tensor in trained.items()}
        self.load_state_dict(parts, strict=False)


def recompute_in_eval(model: nn.Module) -> None:
    """Lets gradient checkpointing work in eval mode: a layer recomputes only while it trains."""
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
