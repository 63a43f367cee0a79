"""Costs of attention: parameters, and the KV cache."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import DynamicCache, PreTrainedModel

from headprune.config import NonNegativeInt
from headprune.model.attention import attention_of, family_of
from headprune.model.batch import most_tokens, task_of
from headprune.runtime.modeling_headprune import Attention, width

GENERATES = ("causal-lm", "seq2seq-lm")
CACHED = ("self", "decoder", "text")  # kinds of attention that cache every token they generate
STUB = 2  # numbers per token in the cache of a layer without heads
CONTEXTS = (2_048, 8_192, 32_768, 131_072)  # tokens of caches in reports
CONTEXT = 8_192  # tokens at which the caches of models with windows are stated


@dataclass(frozen=True)
class ModelCost:
    """Sizes of a model.

    Attributes:
        parameters: All parameters; tied ones count once.
        attention_parameters: Parameters of the attention projections.
        query_heads: Query heads of all modules.
        kv_heads: KV heads of all modules.
        kv_cache_bytes: KV cache of ``kv_cache_tokens`` in the model's dtype; 0 for models that
            generate nothing.
        kv_cache_tokens: The context: 1, or with windows ``stated_context``.
        kv_cache_bytes_at: KV cache of each of ``CONTEXTS`` that the model takes, by its tokens.
    """

    parameters: NonNegativeInt
    attention_parameters: NonNegativeInt
    query_heads: NonNegativeInt
    kv_heads: NonNegativeInt
    kv_cache_bytes: NonNegativeInt
    kv_cache_tokens: NonNegativeInt
    kv_cache_bytes_at: Mapping[int, NonNegativeInt]


def cache_layers(model: PreTrainedModel) -> list[Any]:
    """Return the layers of a model's cache, empty; none where code of its own keeps it."""
    text = model.config.get_text_config(decoder=True)
    return list(DynamicCache(config=text if hasattr(text, "num_hidden_layers") else None).layers)


def layer_number(module: nn.Module) -> int | None:
    """Return the number of an attention module's layer in the cache; None where it has none."""
    number: int | None = getattr(module, "layer_id", getattr(module, "layer_idx", None))
    return number


@dataclass(frozen=True)
class KVCache:
    """The numbers in the KV cache of one sequence, by attention module.

    Only what grows with generated tokens counts: not the source that cross attention caches, nor
    the states of layers without attention.

    Attributes:
        per_token: Numbers per token by module path: mostly 2 * kv_heads * head_dim; of a layer
            without heads a K and a V of one number.
        windows: The most tokens that a module keeps, where there is a bound.
        near: Of modules with window heads, their numbers per token among these, and the most tokens
            that they keep.
    """

    per_token: Mapping[str, int]
    windows: Mapping[str, int]
    near: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: PreTrainedModel) -> KVCache:
        """Return that of a model; empty for one that generates nothing."""
        if task_of(model) not in GENERATES:
            return cls({}, {})
        text, layers = model.config.get_text_config(decoder=True), cache_layers(model)
        # a layer with a window keeps the tokens that the next one sees beside itself; one as wide
        # as the positions of the model, as of Phi-3, hides nothing
        most = getattr(text, "max_position_embeddings", None) or math.inf
        lasting = {
            number: layer.sliding_window - 1
            for number, layer in enumerate(layers)
            if 1 < getattr(layer, "sliding_window", 0) < most
        }
        family, per_token, windows, near = family_of(model.config), {}, {}, {}
        repeats = family.caches_query_heads and getattr(model.config, family.caches_query_heads)
        for attention in (a for a in attention_of(model) if a.kind in CACHED):
            module = attention.module
            layer = layer_number(module)
            per_token[attention.path] = _per_token(attention, family.cached_width, bool(repeats))
            if layer in lasting:
                windows[attention.path] = lasting[layer]
            if attention.window is not None:
                each = attention.window_heads * kv_width(attention)
                near[attention.path] = each, sum(attention.window)
        return cls(per_token, windows, near)

    def kept(self, path: str, context: int) -> int:
        """Return how many tokens of a context a module keeps; 0 for one that caches none."""
        return min(context, self.windows.get(path, context)) if path in self.per_token else 0

    def elements(self, context: int) -> int:
        """Return the cached numbers of a context."""
        whole = sum(each * self.kept(path, context) for path, each in self.per_token.items())
        return whole - sum(each * max(0, context - most) for each, most in self.near.values())

    def lost_beyond(self, whole: KVCache) -> int:
        """Return the longest sequence in which a module with less than ``whole`` loses nothing.

        0 where none has less.
        """
        layers = (
            most + 1  # the current token is not of the cache
            for path, most in self.windows.items()
            if most < whole.windows.get(path, sys.maxsize)
        )
        heads = (near[1] for path, near in self.near.items() if near != whole.near.get(path))
        return max([*layers, *heads], default=0)


def stated_context(*models: PreTrainedModel) -> int:
    """Return the tokens at which caches are stated: 1, or ``CONTEXT`` where one has windows.

    Fewer where a model has fewer positions.
    """
    caches = [KVCache.of(model) for model in models]
    if not any(cache.windows or cache.near for cache in caches):
        return 1
    return usual_context(*models)


def usual_context(*models: PreTrainedModel) -> int:
    """Return ``CONTEXT``, or the number of positions of all models, if that is less."""
    return min([CONTEXT, *filter(None, map(most_tokens, models))])


def usual_window(context: int) -> int:
    """Return the default size of a window of heads, in tokens."""
    return max(1, min(1_024, context // 4))


def kv_width(attention: Attention) -> int:
    """Return the numbers of K and V of one KV head and token; V may be narrower than K."""
    widths = {role: p.head_dim for p in attention.projections for role in p.holds}
    return sum(widths.get(role, attention.head_dim) for role in "kv")


def _per_token(attention: Attention, cached_width: str | None, repeats: bool) -> int:
    if not attention.query_heads:
        return STUB
    if cached_width is not None:
        return sum(_number(attention.module, name) for name in cached_width.split("+"))
    return (attention.query_heads if repeats else attention.kv_heads) * kv_width(attention)


def _number(module: nn.Module, name: str) -> int:
    """Return a number of a module, or of a module in it; 0 where that is missing."""
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part, 0)
    return int(value)


def attention_parameters(attention: Attention) -> int:
    """Return the parameters of one attention module's projections."""
    return sum(p.numel() for row in attention.projections for p in row.module.parameters())


def parameters_of_heads(attention: Attention) -> int:
    """Return the parameters of one attention module that go with its heads."""
    parts = (row.module for row in attention.projections if row.holds)
    return sum(p.numel() for part in parts for p in part.parameters())


def kv_heads_of(model: PreTrainedModel, attention: Attention) -> int:
    """Return the KV heads of a module; of those whose K and V stay, 0 if it reads another's."""
    if not family_of(model.config).keeps_kv:
        return attention.kv_heads
    whole = [width(p.module, 0) // p.head_dim for p in attention.projections if not p.holds]
    return whole[0] if whole else 0


def model_cost(model: PreTrainedModel, context: int | None = None) -> ModelCost:
    """Return the sizes of a model's weights, and of its cache of a context."""
    attentions, context = attention_of(model), context or stated_context(model)
    cache, most = KVCache.of(model), most_tokens(model) or sys.maxsize
    return ModelCost(
        parameters=model.num_parameters(),
        attention_parameters=sum(map(attention_parameters, attentions)),
        query_heads=sum(a.query_heads for a in attentions),
        kv_heads=sum(kv_heads_of(model, a) for a in attentions),
        kv_cache_bytes=cache.elements(context) * model.dtype.itemsize,
        kv_cache_tokens=context,
        kv_cache_bytes_at={
            n: cache.elements(n) * model.dtype.itemsize
            for n in CONTEXTS
            if cache.per_token and n <= most
        },
    )


def longest_context(model: PreTrainedModel, memory: int) -> int | None:
    """Return the tokens of KV cache beside the weights in ``memory`` bytes; None without a cache.

    All sequences of a batch count together; activations come on top. With windows it is the longest
    single sequence, of at most the model's positions.
    """
    cache, most = KVCache.of(model), sys.maxsize
    if not cache.per_token:
        return None
    if cache.windows or cache.near:
        most = most_tokens(model) or most
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    room = (memory - weights) // model.dtype.itemsize
    return bisect_right(range(1, most + 1), room, key=cache.elements)
