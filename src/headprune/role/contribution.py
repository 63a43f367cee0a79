"""How much a head writes, beside what the layer reads.

    mean over tokens of |W_O,h z_h| / |residual|

where z_h is the head's output and the residual what enters its layer. A head that looks somewhere
and writes nothing has a pattern and no part in what the model computes (Kobayashi et al. 2020,
arXiv 2004.10102).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.model.attention import layer_of
from headprune.model.batch import Batch, real_tokens, token_mask
from headprune.model.heads import read_output
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.roles import ModuleRoles


class Contributions:
    """Sums up what heads write while a model reads.

    Args:
        net: The model.
        attentions: The modules to look at.
    """

    batch: Batch

    def __init__(self, net: PreTrainedModel, attentions: Sequence[Attention]) -> None:
        self._net, self._attentions = net, attentions
        self._residual: dict[str, Tensor] = {}
        self._sums: list[Tensor] = [torch.zeros(a.query_heads).double() for a in attentions]
        self._tokens = [0 for _ in attentions]

    def attach(self, stack: ExitStack) -> None:
        """Puts hooks on layers and output projections."""
        there = [a for a in self._attentions if a.query_heads]
        for path in {layer_of(a.path): None for a in there}:
            layer, hook = self._net.get_submodule(path), partial(self._enters, path)
            stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for position, attention in enumerate(self._attentions):
            if attention.query_heads:
                hook = partial(self._writes, position, _gram(attention))
                handle = attention.output_projection.register_forward_pre_hook(hook)
                stack.callback(handle.remove)

    def _enters(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        self._residual[path] = states.float().norm(dim=-1, keepdim=True)

    def _writes(self, position: int, gram: Tensor, module: nn.Module, args: Any) -> None:
        attention = self._attentions[position]
        residual = self._residual.get(layer_of(attention.path))
        heads = args[0].float().unflatten(-1, (attention.query_heads, -1))
        squares = torch.einsum("...hd,hde,...he->...h", heads, gram.to(heads), heads)
        if residual is None or residual.shape[:-1] != squares.shape[:-1]:
            return  # a module outside of layers, or one that lays tokens out otherwise
        share = squares.clamp(min=0).sqrt() / residual.clamp(min=1e-12)
        tokens = real_tokens(share, token_mask(self.batch, attention.kind))
        self._sums[position] += tokens.sum(0).cpu().double()
        self._tokens[position] += len(tokens)

    def found(self, position: int) -> list[float | None]:
        """Of every head of a module; None where nothing was seen."""
        tokens = self._tokens[position]
        return [total / tokens if tokens else None for total in self._sums[position].tolist()]


def with_contributions(
    modules: Sequence[ModuleRoles], found: Contributions
) -> tuple[ModuleRoles, ...]:
    """The same with what every head contributes."""
    return tuple(
        module.model_copy(
            update={
                "heads": tuple(
                    head.model_copy(update={"contribution": norm})
                    for head, norm in zip(module.heads, found.found(position), strict=True)
                )
            }
        )
        for position, module in enumerate(modules)
    )


def _gram(attention: Attention) -> Tensor:
    output = read_output(attention)[0]
    return torch.einsum("hod,hoe->hde", output, output)
