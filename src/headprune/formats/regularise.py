"""Zero heads for engines without empty layers and ragged groups.

The model computes the same: a query head with zero columns in W_O adds nothing. Ragged groups get
zero query heads up to the largest group, at no cost in KV cache. An empty layer gets one query head
and one KV head of zeros, which the cache then holds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import torch
from transformers import PreTrainedConfig

from headprune.errors import PlanError
from headprune.formats.source import ExportSource, built
from headprune.io.shards import Piece
from headprune.model.attention import family_of
from headprune.model.cost import kv_width
from headprune.planning.padding import zero_heads_said
from headprune.planning.targets import zero_heads_refusal
from headprune.runtime.modeling_headprune import Attention, input_dim, layout_entry
from headprune.surgery.cut import layer_overrides
from headprune.tensors.index_maps import IndexMap
from headprune.tensors.zero_heads import Slots, padded

Sizes = Callable[[Attention], tuple[Slots, Slots]]
"""The query heads and the KV heads of a module's result."""


def _regular(attention: Attention) -> tuple[Slots, Slots]:
    return padded(attention.group_sizes, max(attention.group_sizes, default=1))


def regularise(
    source: ExportSource,
    may_be_empty: Callable[[int], bool] = lambda layer: False,
) -> tuple[ExportSource, tuple[str, ...]]:
    """Add zero heads where a model needs some.

    Args:
        source: The model.
        may_be_empty: Return whether a layer without heads may stay so.

    Returns:
        The model, the same object where it needs none; and the additions, a sentence each.

    Raises:
        PlanError: If its family has more tensors with a part per head than projections.
    """
    added = {
        layer: attention
        for layer, attention in enumerate(source.attentions)
        if len(set(attention.group_sizes)) > 1 or not (attention.query_heads or may_be_empty(layer))
    }
    if not added:
        return source, ()
    reason = zero_heads_refusal(source.net)
    if reason is not None:
        raise PlanError(f"{reason[0].upper()}{reason[1:]} Cut it with --for vllm.")
    config = copy.deepcopy(source.config)
    for attention in added.values():
        config.headprune["layout"][attention.path] = entry(attention, *_regular(attention))
    regular = moved(source, config, list(added.values()), _regular)
    ragged = [layer for layer, attention in added.items() if attention.query_heads]
    empty = {layer: kv_width(a) for layer, a in added.items() if not a.query_heads}
    return regular, tuple(zero_heads_said(ragged, empty))


def moved(
    source: ExportSource, config: PreTrainedConfig, attentions: Sequence[Attention], sizes: Sizes
) -> ExportSource:
    """Return a model with the heads of some modules in other places, zeros in between.

    Args:
        source: The model.
        config: The config of the result.
        attentions: The modules.
        sizes: Return the query heads and the KV heads of a module's result.
    """
    moves: dict[str, tuple[Slots, int, int]] = {}
    for attention in attentions:
        queries, kv_heads = sizes(attention)
        for p in attention.projections:
            slots = {"q": queries, "k": kv_heads, "v": kv_heads, "o": queries}[p.holds]
            dim = input_dim(p.module)
            moves[f"{p.path}.weight"] = slots, p.head_dim, dim if p.holds == "o" else 1 - dim
            if p.holds != "o":
                moves[f"{p.path}.bias"] = slots, p.head_dim, 0
    weights = {
        name: _spread(piece, *moves[name]) if name in moves else piece
        for name, piece in source.weights.items()
    }
    regular = replace(source, config=config, net=built(config), weights=weights)
    if config.per_layer_config is not None and config.allow_global_per_layer_attribute_access:
        family = family_of(config)
        config.per_layer_config = None
        config.per_layer_config = {
            layer: layer_overrides(attention, family)
            for layer, attention in enumerate(regular.attentions)
        }
    return regular


def entry(attention: Attention, queries: Slots, kv_heads: Slots) -> dict[str, list[int]]:
    """Return the entry of the layout; zero heads and copies get unused ids."""
    size = len(queries) // len(kv_heads)
    ids = _ids(attention.query_ids, queries), _ids(attention.kv_ids, kv_heads)
    return layout_entry(*ids, [size] * len(kv_heads))


def _ids(present: Sequence[int], slots: Slots) -> list[int]:
    unused = (number for number in count() if number not in present)
    first = [slot is not None and slot not in slots[:place] for place, slot in enumerate(slots)]
    return [
        present[slot] if slot is not None and new else next(unused)
        for slot, new in zip(slots, first, strict=True)
    ]


def _spread(piece: Piece, slots: Slots, head_dim: int, dim: int) -> Piece:
    """Return a tensor with the heads along a dimension in their slots, zeros in between."""
    present = [slot is not None for slot in slots]
    if not any(present):
        shape = list(piece.shape)
        shape[dim] = len(slots) * head_dim
        return replace(piece, source=torch.zeros(shape, dtype=piece.dtype))
    heads = torch.tensor([slot or 0 for slot in slots])
    indices = (heads[:, None] * head_dim + torch.arange(head_dim)).flatten()
    scale = torch.tensor(present).repeat_interleave(head_dim).float()
    return replace(piece, kept=IndexMap(piece.name, dim, indices, scale))
