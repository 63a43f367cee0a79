"""headprune inspect: a model's attention, and the savings of a cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from headprune.context import Allowed
from headprune.model import cost
from headprune.model.attention import attention_of, family_of, layer_of
from headprune.model.batch import task_of
from headprune.model.loading import from_pretrained, load_config
from headprune.model.refusals import PACKED, quantised_by
from headprune.model.units import default_unit, unit_sizes
from headprune.runtime.modeling_headprune import Attention
from headprune.tensors.dtypes import dtype_name
from headprune.tensors.units import Unit

# kernels and quantisers are tuned for these widths; narrower heads waste lanes
USUAL_HEAD_DIMS = (64, 128)
_QUANTISE_FIRST = (
    "For a smaller KV cache, quantise it in the engine first: 8 bits cost SmolLM2-135M no "
    "perplexity in llama.cpp, and 4 bits 4 %."
)


class _InspectionPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AttentionReport(_InspectionPart):
    """One attention module.

    Attributes:
        path: Module path; the key of plans.
        kind: "self", "encoder", "decoder", "cross", "text" or "vision".
        query_heads: Query heads.
        kv_heads: KV heads.
        head_dim: Width of a head.
        parameters: Parameters of its projections.
    """

    path: str
    kind: str
    query_heads: int
    kv_heads: int
    head_dim: int
    parameters: int


class Saving(_InspectionPart):
    """The savings of removing a fraction of the heads.

    Attributes:
        heads_removed: The fraction.
        parameters: Parameters saved.
        kv_cache_bytes: KV cache saved, in the model's dtype.
    """

    heads_removed: float
    parameters: int
    kv_cache_bytes: int


class LatentPrice(_InspectionPart):
    """The cost of a latent attention (MLA), measured in place.

    Attributes:
        kv_cache_bytes_per_token: KV cache per token, in 16 bits.
        rank: Width of the latent.
        rope_dim: Width of the rotary key.
        lost: Share of the weighted variance of [K without rotation; V] beyond the rank.
        perplexity_ratio: Perplexity on held-out text over the original's.
    """

    kv_cache_bytes_per_token: int
    rank: int
    rope_dim: int
    lost: float
    perplexity_ratio: float


class Inspection(_InspectionPart):
    """A model's attention.

    Attributes:
        family: Model type of its row, in the table or by structure.
        architecture: Class of the model.
        task: Task of its head.
        dtype: Element type of the checkpoint.
        unit: The unit that train-gates removes by default.
        units: Number of such units.
        attentions: Its attention modules.
        parameters: All parameters.
        attention_parameters: Parameters of the attention projections.
        kv_cache_bytes: KV cache of ``kv_cache_tokens``, by the element type of the cache; empty
            for models that generate nothing.
        kv_cache_tokens: The context: 1, or with windows up to 8,192.
        savings: Savings of cuts of several sizes.
        notes: Remarks to read before a cut.
        joint_ranks: Per module, the rank of [K without rotation; V] that holds 99 % of its weighted
            variance; with --latent.
        latents: Cost of latents of several sizes; with --latent.
    """

    schema_version: Literal[1] = 1
    family: str
    architecture: str
    task: str
    dtype: str
    unit: Unit
    units: int
    attentions: tuple[AttentionReport, ...]
    parameters: int
    attention_parameters: int
    kv_cache_bytes: dict[str, int]
    kv_cache_tokens: int
    savings: tuple[Saving, ...]
    notes: tuple[str, ...]
    joint_ranks: dict[str, int] = {}
    latents: tuple[LatentPrice, ...] = ()


def inspect(model: str | Path, allowed: Allowed = Allowed()) -> Inspection:
    """Describe a model's attention without reading its weights.

    Args:
        model: Folder or hub id.
        allowed: Permissions to open it with.

    Raises:
        HeadpruneError: If it cannot be opened or its family is not supported.
    """
    config = load_config(model, trust_remote_code=allowed.trust_remote_code)
    net = from_pretrained(
        model,
        trust_remote_code=allowed.trust_remote_code,
        drop_unexpected=allowed.drop_unexpected,
        weights=False,
    )
    attentions, sizes = attention_of(net), cost.model_cost(net)
    unit, elements = default_unit(attentions), sizes.kv_cache_bytes // net.dtype.itemsize
    widths = cost.BYTES_PER_ELEMENT if elements else {}
    family = family_of(net.config)
    cache_of_heads = 0 if family.cached_width else sizes.kv_cache_bytes
    return Inspection(
        family=family.model_type,
        architecture=type(net).__name__,
        task=task_of(net),
        dtype=dtype_name(net.dtype),
        unit=unit,
        units=len(unit_sizes(attentions, unit)),
        attentions=tuple(
            AttentionReport(
                path=a.path,
                kind=a.kind,
                query_heads=a.query_heads,
                kv_heads=cost.kv_heads_of(net, a),
                head_dim=a.head_dim,
                parameters=cost.attention_parameters(a),
            )
            for a in attentions
        ),
        parameters=sizes.parameters,
        attention_parameters=sizes.attention_parameters,
        kv_cache_bytes={name: elements * width for name, width in widths.items()},
        kv_cache_tokens=sizes.kv_cache_tokens,
        savings=tuple(
            Saving(
                heads_removed=fraction,
                parameters=round(fraction * sum(map(cost.parameters_of_heads, attentions))),
                kv_cache_bytes=round(fraction * cache_of_heads),
            )
            for fraction in (0.25, 0.5, 0.75)
        ),
        notes=(
            *_notes(config, {a.head_dim for a in attentions}, _without_heads(net, attentions)),
            *[f"{family.model_type}: {family.fewer_kv_heads}."] * bool(family.cached_width),
            *[_QUANTISE_FIRST] * bool(elements),
        ),
    )


def _without_heads(net: PreTrainedModel, attentions: Sequence[Attention]) -> tuple[int, int]:
    """Return the layers of a hybrid model without attention heads, and all layers beside them."""
    layers = {layer_of(a.path) for a in attentions}
    stacks = {net.get_submodule(layer.rpartition(".")[0]) for layer in layers if "." in layer}
    total = sum(len(stack) for stack in stacks if isinstance(stack, nn.ModuleList))
    return max(0, total - len(layers)), total


def _notes(
    config: PreTrainedConfig, head_dims: set[int], without_heads: tuple[int, int]
) -> tuple[str, ...]:
    usual, method = " and ".join(map(str, USUAL_HEAD_DIMS)), quantised_by(config)
    notes = [] if method is None else [f"It is quantised ({method}): {PACKED}"]
    if without_heads[0]:
        notes.append(f"{without_heads[0]} of {without_heads[1]} layers have no heads: they stay.")
    for head_dim in sorted(head_dims - set(USUAL_HEAD_DIMS)):
        narrow = f"under the usual {usual}: attention kernels gain less from fewer heads"
        wide = f"not one of the usual {usual}, but no narrower"
        notes.append(
            f"head_dim {head_dim} is {narrow if head_dim < min(USUAL_HEAD_DIMS) else wide}."
        )
    return tuple(notes)
