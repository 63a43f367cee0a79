"""Savings of a cut in parameters and KV cache, as sums over the heads that stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from headprune.errors import PlanError
from headprune.model.attention import family_of
from headprune.model.cost import GENERATES, STUB, KVCache, kv_width
from headprune.model.loading import task_of
from headprune.runtime.modeling_headprune import Attention
from headprune.tensors.index_maps import role_slices


@dataclass(frozen=True)
class Price:
    """The price of one attention module: a sum over its parts.

    Attributes:
        query_head: Of every query head.
        kv_head: Of every KV head.
        module: Of the module, as long as it has a head.
    """

    query_head: float
    kv_head: float
    module: float = 0.0


@dataclass(frozen=True)
class Prices:
    """A budgeted quantity of a whole model.

    Attributes:
        rest: The price without any head.
        modules: Price of every attention module, in order.
    """

    rest: float
    modules: tuple[Price, ...]

    def total(self, kept: Sequence[tuple[int, int]]) -> float:
        """Return the quantity for query and KV heads per module."""
        return self.rest + sum(
            p.query_head * queries + p.kv_head * kv + (p.module if queries else 0.0)
            for p, (queries, kv) in zip(self.modules, kept, strict=True)
        )


def parameter_prices(model: PreTrainedModel, attentions: Sequence[Attention]) -> Prices:
    """Return the prices in parameters."""
    prices = [_parameters(attention) for attention in attentions]
    mine = sum(
        p.query_head * a.query_heads + p.kv_head * a.kv_heads
        for p, a in zip(prices, attentions, strict=True)
    )
    return Prices(float(model.num_parameters() - mine), tuple(prices))


def cache_prices(
    model: PreTrainedModel, attentions: Sequence[Attention], dtype: torch.dtype, context: int
) -> Prices:
    """Return the prices in bytes of the KV cache of a context.

    Args:
        model: The model.
        attentions: The modules that may lose heads.
        dtype: Element type of the cache.
        context: Tokens in it.

    Raises:
        PlanError: If the model has no cache, or one that is no sum over its KV heads.
    """
    family = family_of(model.config)
    if task_of(model) not in GENERATES:
        raise PlanError("--max-kv-bytes: this model generates nothing, so it has no KV cache.")
    if family.cached_width is not None or family.caches_query_heads is not None:
        raise PlanError(
            f"--max-kv-bytes: the cache of {family.model_type} is not a sum over its KV heads. "
            "Give --keep or --max-params."
        )
    size, cache = dtype.itemsize, KVCache.of(model)
    if cache.near:
        raise PlanError(
            "--max-kv-bytes: some KV heads have a window, and cost less than others. Remove heads "
            "first, and give windows last."
        )
    prices = []
    for attention in attentions:
        each = float(size * cache.kept(attention.path, context))
        # a stub goes with the first head
        prices.append(Price(0.0, kv_width(attention) * each, -STUB * each))
    mine = Prices(0.0, tuple(prices)).total([(a.query_heads, a.kv_heads) for a in attentions])
    return Prices(float(cache.elements(context) * size - mine), tuple(prices))


def _parameters(attention: Attention) -> Price:
    query = kv = 0
    for projection in attention.projections:
        if not projection.holds:
            continue
        parameters = dict(projection.module.named_parameters(recurse=False))
        weight = parameters["weight"]
        total = {"q": attention.query_heads, "k": attention.kv_heads, "v": attention.kv_heads}
        slices = role_slices(projection.holds, projection.groups, total, projection.head_dim)
        along = sum(rows.numel() for rows in slices.values())
        per_slice = weight.numel() // max(along, 1)
        if projection.holds != "o" and "bias" in parameters:
            per_slice += 1
        for role in slices:
            if role in ("q", "o"):
                query += per_slice * projection.head_dim
            else:
                kv += per_slice * projection.head_dim
    return Price(float(query), float(kv))
