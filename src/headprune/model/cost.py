"""Costs of attention: parameters, and the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from headprune.config import Amount
from headprune.model.attention import attention_of, family_of
from headprune.model.batch import task_of
from headprune.runtime.modeling_headprune import Attention, width

GENERATES = ("causal-lm", "seq2seq-lm")
CACHED = ("self", "decoder", "text")  # kinds of attention that cache every token they generate
STUB = 2  # numbers per token in the cache of a layer without heads
BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


@dataclass(frozen=True)
class ModelCost:
    """Sizes of a model.

    Attributes:
        parameters: All parameters; tied ones count once.
        attention_parameters: Parameters of the attention projections.
        query_heads: Query heads of all modules.
        kv_heads: KV heads of all modules.
        kv_cache_bytes_per_token: KV cache per token in the model's dtype; 0 for models that
            generate nothing.
    """

    parameters: Amount
    attention_parameters: Amount
    query_heads: Amount
    kv_heads: Amount
    kv_cache_bytes_per_token: Amount


def kv_cache_elements_per_token(model: PreTrainedModel) -> int:
    """Return the cached numbers per generated token: mostly 2 * sum(kv_heads * head_dim).

    Encoders and cross attention cache none. A layer without heads caches a K and a V of one number.
    """
    family = family_of(model.config)
    cached = [a for a in attention_of(model) if a.kind in CACHED]
    stubs = STUB * sum(not a.query_heads for a in cached)
    if family.cached_width is not None:
        names = family.cached_width.split("+")
        with_heads = (a.module for a in cached if a.query_heads)
        return stubs + sum(_number(m, name) for m in with_heads for name in names)
    repeats = family.caches_query_heads and getattr(model.config, family.caches_query_heads)
    return stubs + 2 * sum((a.query_heads if repeats else a.kv_heads) * a.head_dim for a in cached)


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


def model_cost(model: PreTrainedModel) -> ModelCost:
    """Return the sizes of a model's weights."""
    attentions = attention_of(model)
    cached = kv_cache_elements_per_token(model) if task_of(model) in GENERATES else 0
    return ModelCost(
        parameters=model.num_parameters(),
        attention_parameters=sum(map(attention_parameters, attentions)),
        query_heads=sum(a.query_heads for a in attentions),
        kv_heads=sum(kv_heads_of(model, a) for a in attentions),
        kv_cache_bytes_per_token=cached * model.dtype.itemsize,
    )


def longest_context(model: PreTrainedModel, memory: int) -> int | None:
    """Return the tokens of KV cache beside the weights in ``memory`` bytes; None without a cache.

    All sequences of a batch count together; activations come on top.
    """
    per_token = model_cost(model).kv_cache_bytes_per_token
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return max(0, memory - weights) // per_token if per_token else None
