"""Marian's SSRU, a recurrence, where the decoder of MarianMTModel has self attention.

    f_t = sigmoid(W_f x_t + b_f)
    c_t = f_t c_(t-1) + (1 - f_t) W x_t
    out_t = relu(c_t)

Kim et al. 2019, From Research to Production and Back (WNGT): the students of Bergamot decode by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers.models.marian import modeling_marian


class Ssru(nn.Module):
    """The recurrence of one layer.

    Args:
        width: Of what enters and leaves it.
        layer: Its place in the cache, which holds every c_t where attention has a key.
    """

    def __init__(self, width: int, layer: int) -> None:
        super().__init__()
        self.candidate = nn.Linear(width, width, bias=False)
        self.forget = nn.Linear(width, width)
        self.layer = layer

    def forward(
        self, hidden_states: Tensor, past_key_values: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Called as self attention is; there are no weights to return."""
        forget = self.forget(hidden_states).sigmoid()
        new = (1 - forget) * self.candidate(hidden_states)
        cache = getattr(past_key_values, "self_attention_cache", past_key_values)
        state = torch.zeros_like(new[:, 0])
        if cache is not None and cache.get_seq_length(self.layer):
            state = cache.layers[self.layer].keys[:, 0, -1]
        states = []
        for step in range(new.shape[1]):
            state = forget[:, step] * state + new[:, step]
            states.append(state)
        run = torch.stack(states, 1)
        if cache is not None:
            cache.update(run[:, None], run[:, None, :, :0], self.layer)
        return run.relu(), None


class SsruDecoderLayer(modeling_marian.MarianDecoderLayer):
    """A decoder layer of Marian with an SSRU, which has no heads: nothing looks for them there."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx)
        del self.self_attn
        self.ssru = Ssru(config.d_model, layer_idx or 0)

    @property
    def self_attn(self) -> nn.Module:
        """What the stock forward calls."""
        return self.ssru


@contextmanager
def ssru_decoders() -> Iterator[None]:
    """Builds and loads every MarianMTModel with SSRUs, results of a cut included."""
    with mock.patch.object(modeling_marian, "MarianDecoderLayer", SsruDecoderLayer):
        yield
