"""A model as llama.cpp knows it: architecture, keys, and which tensors go where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from headprune.engines import llama_cpp
from headprune.engines.llama_cpp import ARCHES, Arch
from headprune.engines.targets import generates_none
from headprune.exporting.regularise import regularise
from headprune.exporting.source import ExportSource
from headprune.runtime.modeling_headprune import Attention

ROPE_FACTORS = "rope_freqs.weight"


def is_even(source: ExportSource) -> bool:
    """Whether all layers have the same heads, in groups of one size."""
    first = source.attentions[0].group_sizes
    return len(set(first)) == 1 and all(a.group_sizes == first for a in source.attentions)


def arch_of(source: ExportSource) -> Arch:
    """The architecture that holds a prepared model; ``refusal`` has been asked before."""
    even, uneven = ARCHES[source.config.model_type]
    arch = even if is_even(source) else uneven
    assert arch is not None
    return arch


def prepared(source: ExportSource) -> tuple[ExportSource, tuple[str, ...]]:
    """The model with zero heads where the architecture needs some, and what was added."""
    uneven = ARCHES[source.config.model_type][1]

    def may_be_empty(layer: int) -> bool:
        # an output bias is read, and left out where there are no heads; sizes are those of layer 0
        bias = source.weights.get(f"model.layers.{layer}.self_attn.o_proj.bias")
        skips = uneven is not None and uneven.skips_attention
        return skips and layer > 0 and (bias is None or not bias.any())

    return regularise(source, may_be_empty)


def refusal(source: ExportSource) -> str | None:
    """Why no architecture of llama.cpp holds a model; None if one does."""
    reason = llama_cpp.refusal(source.config) or generates_none(source.net)
    if reason is not None or is_even(prepared(source)[0]):
        return reason
    reason = llama_cpp.uneven_refusal(source.config)
    if reason is None:
        return None
    layer = source.attentions[_odd_one(source.attentions)].path
    return (
        f"{layer} has other heads than the first layer, and {reason} prune --for llama.cpp makes a "
        "result that it holds."
    )


def _odd_one(attentions: tuple[Attention, ...]) -> int:
    """The first layer with other heads than layer 0; 0 where all are alike."""
    first = attentions[0]
    same = (first.query_heads, first.group_sizes)
    return next((i for i, a in enumerate(attentions) if (a.query_heads, a.group_sizes) != same), 0)


@dataclass(frozen=True)
class Part:
    """Rows of a tensor in the file.

    Attributes:
        source: Name of the tensor of the model.
        heads: How many heads its rows are, where their order changes; 0 where it stays.
    """

    source: str
    heads: int = 0


@dataclass(frozen=True)
class FileTensor:
    """A tensor in the file.

    Attributes:
        name: Its name there.
        parts: Its rows.
        shape: Its shape.
    """

    name: str
    parts: tuple[Part, ...]
    shape: tuple[int, ...]


def neighbouring(rows: Shaped[Tensor, " rows *_"], heads: int) -> Shaped[Tensor, " rows *_"]:
    """Orders rows of q or k so that pairs that are turned together are neighbours."""
    by_half: Tensor = rows.unflatten(0, (heads, 2, -1))
    return by_half.transpose(1, 2).reshape(rows.shape)


def by_halves(rows: Shaped[Tensor, " rows *_"], heads: int) -> Shaped[Tensor, " rows *_"]:
    """The other way round."""
    by_pair: Tensor = rows.unflatten(0, (heads, -1, 2))
    return by_pair.transpose(1, 2).reshape(rows.shape)


def tensors(source: ExportSource, arch: Arch) -> list[FileTensor]:
    """All tensors of the file, in its order."""
    found = [_plain(source, "token_embd.weight", "model.embed_tokens.weight")]
    for layer, attention in enumerate(source.attentions):
        found += _layer(source, arch, layer, attention)
    found.append(_plain(source, "output_norm.weight", "model.norm.weight"))
    if not source.config.tie_word_embeddings:
        found.append(_plain(source, "output.weight", "lm_head.weight"))
    return [tensor for tensor in found if tensor is not None]


def _layer(
    source: ExportSource, arch: Arch, layer: int, attention: Attention
) -> Iterator[FileTensor | None]:
    at, block = f"model.layers.{layer}", f"blk.{layer}"
    if attention.query_heads:
        yield _plain(source, f"{block}.attn_norm.weight", f"{at}.input_layernorm.weight")
        counts = {"q": attention.query_heads, "k": attention.kv_heads, "v": attention.kv_heads}
        if arch.stacked:
            names = tuple(Part(f"{at}.self_attn.{role}_proj.weight") for role in counts)
            yield _stacked(source, f"{block}.attn_qkv.weight", names)
        for role, heads in counts.items():
            for kind in () if arch.stacked else ("weight", "bias"):
                turned = heads if arch.neighbours and role != "v" else 0
                part = Part(f"{at}.self_attn.{role}_proj.{kind}", turned)
                yield _stacked(source, f"{block}.attn_{role}.{kind}", (part,))
        for role in "qk":
            norm = f"{at}.self_attn.{role}_norm.weight"
            yield _plain(source, f"{block}.attn_{role}_norm.weight", norm)
        for kind in ("weight", "bias"):
            output = f"{at}.self_attn.o_proj.{kind}"
            yield _plain(source, f"{block}.attn_output.{kind}", output)
    yield _plain(source, f"{block}.ffn_norm.weight", f"{at}.post_attention_layernorm.weight")
    for name in ("gate", "up", "down"):
        for kind in ("weight", "bias"):
            yield _plain(source, f"{block}.ffn_{name}.{kind}", f"{at}.mlp.{name}_proj.{kind}")


def _plain(source: ExportSource, name: str, of: str) -> FileTensor | None:
    return _stacked(source, name, (Part(of),))


def _stacked(source: ExportSource, name: str, parts: tuple[Part, ...]) -> FileTensor | None:
    """A tensor of these rows; None where the model has no such."""
    if parts[0].source not in source.weights:
        return None
    shapes = [source.shapes[part.source] for part in parts]
    return FileTensor(name, parts, (sum(shape[0] for shape in shapes), *shapes[0][1:]))


def keys(source: ExportSource, arch: Arch) -> dict[str, int | float | list[int]]:
    """The keys that describe a model, below its architecture's name."""
    config, first = source.config, source.attentions[0]
    rope = llama_cpp.rope(config)
    queries = [attention.query_heads for attention in source.attentions]
    kv_heads = [attention.kv_heads for attention in source.attentions]
    found: dict[str, int | float | list[int]] = {
        "block_count": len(queries),
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": source.shapes["model.embed_tokens.weight"][0],
        "attention.head_count": queries if arch.per_layer else queries[0],
        "attention.head_count_kv": kv_heads if arch.per_layer else kv_heads[0],
        "attention.key_length": first.head_dim,
        "attention.value_length": first.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": first.head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if rope["rope_type"] == "linear":
        found |= {"rope.scaling.factor": float(rope["factor"])}
    return found


def rope_factors(source: ExportSource) -> Float[Tensor, " pairs"] | None:
    """What Llama 3's scaling divides every frequency by; None without such a scaling."""
    rope = llama_cpp.rope(source.config)
    if rope["rope_type"] != "llama3":
        return None
    head_dim, theta = source.attentions[0].head_dim, float(rope["rope_theta"])
    wavelengths = 2 * torch.pi * theta ** (torch.arange(0, head_dim, 2) / head_dim)
    factor, context = rope["factor"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth: Tensor = ((context / wavelengths - low) / (high - low)).clamp(0, 1)
    kept: Tensor = 1 / ((1 - smooth) / factor + smooth)
    return kept
