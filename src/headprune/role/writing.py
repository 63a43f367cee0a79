"""Outputs of heads: |W_O,h z_h| / |residual|.

z_h is the head's output, the residual enters its layer (Kobayashi et al. 2020, arXiv 2004.10102).
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


class Contributions:
    """Sums of the contributions of heads during a pass."""

    batch: Batch

    def __init__(self, net: PreTrainedModel, attentions: Sequence[Attention]) -> None:
        self._net, self._attentions = net, attentions
        self._residual: dict[str, Tensor] = {}
        self._sums: list[Tensor] = [torch.zeros(a.query_heads).double() for a in attentions]
        self._tokens = [0 for _ in attentions]

    def attach(self, stack: ExitStack) -> None:
        for position, attention in enumerate(self._attentions):
            if attention.query_heads:
                weight = read_output(attention)[0]
                gram = torch.einsum("hod,hoe->hde", weight, weight)
                hook = partial(self._writes, position, gram)
                handle = attention.output_projection.register_forward_pre_hook(hook)
                stack.callback(handle.remove)
        for path in {layer_of(a.path): None for a in self._attentions if a.query_heads}:
            layer, hook = self._net.get_submodule(path), partial(self._enters, path)
            stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def of(self, position: int) -> list[float | None]:
        """Return the contribution of every head of a module; None without tokens."""
        tokens = self._tokens[position]
        return [total / tokens if tokens else None for total in self._sums[position].tolist()]

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
