"""A folder whose heads divide by a number, for that many GPUs.

Engines that split heads over GPUs want both counts divisible. The model computes the same: zero
query heads have zero columns in W_O, and a KV head that is there twice serves a part of its queries
each time.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path

from headprune.config import ExportConfig
from headprune.errors import ProofError
from headprune.formats.checkpoint import OnStep, write_checkpoint
from headprune.formats.format import ExportProof, Format
from headprune.formats.regularise import entry, moved
from headprune.formats.source import ExportSource, open_source
from headprune.formats.vllm import read_back
from headprune.model.attention import family_of
from headprune.model.cost import KVCache, model_cost
from headprune.model.stored import commonest_dtype, stored_tensors
from headprune.planning.targets import zero_heads_refusal
from headprune.render.blocks import at_context
from headprune.runtime.modeling_headprune import Attention
from headprune.surgery.cut import config_holds
from headprune.tensors.zero_heads import Slots, divisible

# sums of other lengths round differently: 8.5e-6 measured on 24 layers of Qwen2.5 0.5B
_TOLERANCE = 1e-4
UNPAD = "unpad.json"  # a plan that removes the zero heads again
Padded = tuple[Attention, Slots, Slots]
"""A module, and the query heads and KV heads of its result."""


def _refusal(source: ExportSource, config: ExportConfig) -> str | None:
    """Return why a model cannot be padded."""
    reason = zero_heads_refusal(source.net)
    if reason is not None:
        return reason
    if not family_of(source.config).native:
        return f"the config of a {source.config.model_type} holds no other counts of heads."
    by = _number(config)
    if all(a.query_heads % by == a.kv_heads % by == 0 for a in source.attentions):
        return f"its query heads and KV heads divide by {by} already."
    queries, kv_heads = _most(_every(source, by))
    if not config_holds(source.config, queries, kv_heads):
        return (
            f"its class takes no {queries} query heads with hidden_size "
            f"{source.config.hidden_size}."
        )
    return None


def _number(config: ExportConfig) -> int:
    assert config.multiple_of is not None
    return config.multiple_of


def _every(source: ExportSource, by: int) -> list[Padded]:
    return [(a, *divisible(a.group_sizes, by)) for a in source.attentions]


def _most(every: Sequence[Padded]) -> tuple[int, int]:
    """Return the counts that hold those of every layer."""
    most = max(len(kv_heads) for _, _, kv_heads in every)
    largest = max(len(queries) // len(kv_heads) for _, queries, kv_heads in every)
    return most * largest, most


def _write(
    source: ExportSource, folder: Path, config: ExportConfig, on_step: OnStep
) -> tuple[str, ...]:
    by, wider = _number(config), copy.deepcopy(source.config)
    every, family = _every(source, by), family_of(wider)
    if getattr(wider, "headprune", None) is not None:
        for attention, queries, kv_heads in every:
            wider.headprune["layout"][attention.path] = entry(attention, queries, kv_heads)
    wider.head_dim = source.attentions[0].head_dim
    for key, count in zip((family.query_heads_key, family.kv_heads_key), _most(every), strict=True):
        if key is not None:  # else there are as many as query heads
            setattr(wider, key, count)
    regular = moved(source, wider, source.attentions, lambda a: divisible(a.group_sizes, by))
    write_checkpoint(regular, folder, on_step)
    if all(len(set(kv)) == len(kv) - max(kv.count(None) - 1, 0) for _, _, kv in every):  # no copies
        zero = {a.path: [n for n, slot in enumerate(q) if slot is None] for a, q, _ in every}
        (folder / UNPAD).write_text(json.dumps(zero, indent=2) + "\n", encoding="utf-8")
    return tuple(_said(source, regular, every))


def _said(source: ExportSource, regular: ExportSource, every: Sequence[Padded]) -> list[str]:
    """Return the added heads and their cost, a sentence each."""
    counts = {
        (a.query_heads, len(queries), a.kv_heads, len(kv_heads)): kv_heads
        for a, queries, kv_heads in every
    }
    lines = []
    for (before, after, kv_before, kv_after), kv_heads in counts.items():
        copied = kv_after - kv_heads.count(None) - kv_before
        how = "copies" if copied else "zero heads"
        lines.append(
            f"{before} query heads become {after}, {kv_before} KV heads {kv_after} ({how})."
        )
    old, new = model_cost(source.net), model_cost(regular.net)
    size = (commonest_dtype(stored_tensors(source.folder)) or source.net.dtype).itemsize
    tokens = old.kv_cache_tokens
    cached = [size * KVCache.of(each.net).elements(tokens) for each in (source, regular)]
    lines.append(
        f"KV cache: {cached[0]:,} bytes {at_context(tokens)} become {cached[1]:,}. "
        f"Parameters: {old.parameters:,} become {new.parameters:,}."
    )
    return lines


def _prove(source: ExportSource, folder: Path, config: ExportConfig) -> ExportProof:
    """Run the folder in transformers; refuse counts that do not divide."""
    written = open_source(folder, source.trust_remote_code)
    by = _number(config)
    for attention in written.attentions:
        if attention.query_heads % by or attention.kv_heads % by:
            raise ProofError(
                f"{attention.path} has {attention.query_heads} query heads and "
                f"{attention.kv_heads} KV heads, which do not divide by {by}."
            )
    return read_back(source, written, _TOLERANCE)


FORMAT = Format(
    what="a folder whose heads divide by a number of GPUs",
    refusal=_refusal,
    write=_write,
    prove=_prove,
    serve="vllm serve {}",
)
