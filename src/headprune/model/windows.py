"""KV heads that see a window, in an uncut model: a mask per head.

A window head keeps its weights and loses the far past. Query i sees key j only if i - j < size, or
if j is one of the first ``sinks`` real tokens (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453).
This is the definition that a written result, whose cache forgets keys, is held against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from headprune.errors import PlanError
from headprune.model.attention import attention_of, family_of
from headprune.model.batch import task_of
from headprune.model.cost import KVCache, cache_layers, layer_number
from headprune.runtime import modeling_headprune
from headprune.runtime.modeling_headprune import (
    Attention,
    LayerConfig,
    first_seen,
    mask_of,
    own_attention,
    seen_by,
)

_ATTENDED = "headprune_attended"
Attend = Callable[["AttentionCall"], Tensor]


@dataclass(frozen=True)
class Narrowed:
    """KV heads of a module that see a window.

    Attributes:
        attention: The module.
        kv_positions: The KV heads, by position.
        window: Size and sinks.
    """

    attention: Attention
    kv_positions: tuple[int, ...]
    window: tuple[int, int]


@dataclass(frozen=True)
class AttentionCall:
    """One call of a module's attention function.

    Attributes:
        module: The attention module.
        query: Shape (batch, query heads, length, head_dim).
        key: Shape (batch, KV heads, source length, head_dim).
        value: The same.
        mask: The mask of the model; None for all earlier tokens.
        arguments: Others.
    """

    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    arguments: dict[str, Any]

    def outputs(self, mask: Tensor | None) -> Tensor:
        """Return the outputs of the heads by the model's own function, shape (batch, length, heads,
        head_dim).
        """
        function, _ = own_attention(self.module)
        outputs: Tensor = function(
            self.module, self.query, self.key, self.value, mask, **self.arguments
        )[0]
        return outputs

    def masked(self, kv_positions: Sequence[int], window: tuple[int, int]) -> Tensor:
        """Return the outputs with a window for some KV heads; shape as of ``outputs``."""
        every, near = self.seen(window)
        if len(kv_positions) == self.key.shape[1]:
            return self.outputs(mask_of(near, own_attention(self.module)[1], self.query.dtype))
        group = self.query.shape[1] // self.key.shape[1]
        narrow = torch.zeros(self.key.shape[1], dtype=torch.bool, device=near.device)
        narrow[list(kv_positions)] = True
        narrow = narrow.repeat_interleave(group)[:, None, None]
        seen = torch.where(narrow, near, every)
        return self.outputs(mask_of(seen, own_attention(self.module)[1], self.query.dtype))

    def seen(self, window: tuple[int, int]) -> tuple[Bool[Tensor, ...], Bool[Tensor, ...]]:
        """Return which keys every query sees without and with a window.

        Shape (1 or batch, 1, length, source length).
        """
        (size, sinks), length, new = window, self.key.shape[2], self.query.shape[2]
        i = torch.arange(length - new, length, device=self.key.device)[:, None]
        j = torch.arange(length, device=self.key.device)
        causal = j <= i if getattr(self.module, "is_causal", True) else j >= 0 * i
        every = causal[None, None] if self.mask is None else seen_by(self.mask)
        first = first_seen(self.mask, self.query)
        return every, every & ((i - j < size) | (j < first + sinks))


@contextmanager
def calling(attentions: Sequence[Attention], function: str, **own: Any) -> Iterator[None]:
    """Have modules call another attention function in a ``with`` block.

    Args:
        attentions: The modules.
        function: Its name in transformers' table.
        own: Settings that it reads from the config of a module. ``headprune_before`` is the name of
            the function of a module that had one of its own.

    Raises:
        PlanError: If heads have windows, which it would leave out.
    """
    refuse_windows(attentions)
    modules: list[Any] = [attention.module for attention in attentions]
    before = [getattr(module, "config", None) for module in modules]
    for module, config in zip(modules, before, strict=True):
        kept = dict(vars(config)) if isinstance(config, LayerConfig) else {}
        kept.pop("shared", None)
        own["headprune_before"] = kept.get("_attn_implementation")
        module.config = LayerConfig(config, {**kept, **own, "_attn_implementation": function})
    try:
        yield
    finally:
        for module, config in zip(modules, before, strict=True):
            module.config = config


@contextmanager
def attending(attentions: Sequence[Attention], attend: Attend) -> Iterator[None]:
    """Replace the attention function of some modules in a ``with`` block.

    Args:
        attentions: The modules.
        attend: Maps a call to outputs of shape (batch, length, heads, head_dim).

    Raises:
        PlanError: If a module ran and did not call transformers' attention function, or has
            windows already.
    """
    called = set[Any]()

    def called_by(call: AttentionCall) -> Tensor:
        called.add(call.module)
        return attend(call)

    def check(path: str, module: Any, *_: Any) -> None:
        if module not in called:
            raise PlanError(
                f"'{path}' does not hand its queries and keys to transformers' attention "
                "interface, where windows are applied. Such a model cannot have any."
            )

    with calling(attentions, _ATTENDED, headprune_attend=called_by), ExitStack() as stack:
        for attention in attentions:
            hook = partial(check, attention.path)
            stack.callback(attention.module.register_forward_hook(hook).remove)
        yield


def no_windows(model: PreTrainedModel) -> dict[str, str | None]:
    """Return why the KV heads of a module cannot have windows, by its path; None if they can."""
    cache, family = KVCache.of(model), family_of(model.config)
    row, layers = family.for_runtime(), dict[int | None, Any](enumerate(cache_layers(model)))
    reasons = dict[str, str | None]()
    for attention in attention_of(model):
        why = modeling_headprune.no_windows(attention, row)
        if attention.path not in cache.per_token or task_of(model) != "causal-lm":
            why = "windows shorten the cache of causal language models, and it has none"
        elif family.cached_width:
            why = "its cache holds one latent for all heads"
        elif attention.path in cache.windows or attention.window_heads:
            why = "it has a window already"
        elif isinstance(layers.get(layer_number(attention.module)), LinearAttentionCacheLayerMixin):
            why = "a layer of its cache holds a state beside keys"
        reasons[attention.path] = why
    return reasons


def refuse_windows(attentions: Sequence[Attention]) -> None:
    """Refuse modules with window heads.

    Raises:
        PlanError: Naming the first.
    """
    for attention in attentions:
        if attention.window_heads:
            raise PlanError(
                f"'{attention.path}' has windows already: convert-swa comes last. Give the model "
                "without them."
            )


@contextmanager
def windowed(narrowed: Sequence[Narrowed]) -> Iterator[None]:
    """Have KV heads see a window in a ``with`` block; raises as ``attending`` does."""
    by_module = {each.attention.module: each for each in narrowed}

    def attend(call: AttentionCall) -> Tensor:
        each = by_module[call.module]
        return call.masked(each.kv_positions, each.window)

    with attending([each.attention for each in narrowed], attend):
        yield


def _attended(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
) -> tuple[Tensor, None]:
    call = AttentionCall(module, query, key, value, attention_mask, arguments)
    return module.config.headprune_attend(call), None


AttentionInterface.register(_ATTENDED, _attended)
