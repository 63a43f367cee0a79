"""headprune inspect: a model's attention, and the savings of a cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from headprune.context import Allowed
from headprune.model import cost
from headprune.model.attention import attention_of, family_of, layer_of
from headprune.model.batch import most_tokens, task_of
from headprune.model.loading import from_pretrained, load_config
from headprune.model.refusals import PACKED, quantised_by
from headprune.model.units import default_unit, unit_sizes
from headprune.model.windows import no_windows
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.records import Window
from headprune.schemas.values import Record
from headprune.tensors.dtypes import dtype_name
from headprune.tensors.units import Unit

# kernels and quantisers are tuned for these widths; narrower heads waste lanes
USUAL_HEAD_DIMS = (64, 128)
_QUANTISE_FIRST = (
    "For a smaller KV cache, quantise it in the engine first: 8 bits cost SmolLM2-135M no "
    "perplexity in llama.cpp, and 4 bits 4 %."
)


class AttentionReport(Record):
    """One attention module.

    Attributes:
        path: Module path; the key of plans.
        kind: "self", "encoder", "decoder", "cross", "text" or "vision".
        query_heads: Query heads.
        kv_heads: KV heads.
        window_heads: KV heads of these that see ``Inspection.window`` only.
        head_dim: Width of a head.
        parameters: Parameters of its projections.
    """

    path: str
    kind: str
    query_heads: int
    kv_heads: int
    window_heads: int
    head_dim: int
    parameters: int


class Saving(Record):
    """The savings of removing a fraction of the heads.

    Attributes:
        heads_removed: The fraction.
        parameters: Parameters saved.
    """

    heads_removed: float
    parameters: int


class CacheSize(Record):
    """The KV cache of one sequence, of the model or an offer.

    Attributes:
        kv_heads: Share of the KV heads that stay.
        windowed: Share of them that see a window.
        bytes: Bytes in the model's dtype, by the tokens of a context.
    """

    kv_heads: float = 1.0
    windowed: float = 0.0
    bytes: dict[int, int]


class LatentPrice(Record):
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


class Inspection(Record):
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
        window: What its window heads see; None without any.
        caches: KV caches of the model and of its offers; empty for models that generate nothing.
        offered_window: What window heads of offers see; None where it can have none, or has some.
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
    window: Window | None
    caches: tuple[CacheSize, ...]
    offered_window: Window | None
    savings: tuple[Saving, ...]
    notes: tuple[str, ...]
    joint_ranks: dict[str, int] = Field({})
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
    unit, family = default_unit(attentions), family_of(net.config)
    windows = [Window(size=a.window[0], sinks=a.window[1]) for a in attentions if a.window]
    window = windows[0] if windows else None
    caches, offered = _caches(net, attentions, window)
    layers = cost.KVCache.of(net).windows  # each keeps the tokens that the next one sees
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    if len({*layers.values()}) == 1 and "chunked_attention" not in kinds:
        window = window or Window(size=next(iter(layers.values())) + 1, sinks=0)
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
                # `window` is that of heads where there are any; a layer's own is not counted there
                window_heads=a.window_heads if windows else a.kv_heads * (a.path in layers),
                head_dim=a.head_dim,
                parameters=cost.attention_parameters(a),
            )
            for a in attentions
        ),
        parameters=sizes.parameters,
        attention_parameters=sizes.attention_parameters,
        window=window,
        caches=caches,
        offered_window=offered,
        savings=tuple(
            Saving(
                heads_removed=fraction,
                parameters=round(fraction * sum(map(cost.parameters_of_heads, attentions))),
            )
            for fraction in (0.25, 0.5, 0.75)
        ),
        notes=(
            *_notes(config, {a.head_dim for a in attentions}, _without_heads(net, attentions)),
            *[f"{family.model_type}: {family.fewer_kv_heads}."] * bool(family.cached_width),
            *[_QUANTISE_FIRST] * bool(caches),
        ),
    )


def _caches(
    net: PreTrainedModel, attentions: Sequence[Attention], window: Window | None
) -> tuple[tuple[CacheSize, ...], Window | None]:
    """Return the caches of a model and of its offers, and the window of these."""
    cache, family = cost.KVCache.of(net), family_of(net.config)
    if not cache.per_token:
        return (), None
    most, size = most_tokens(net) or cost.CONTEXTS[-1], net.dtype.itemsize
    contexts = [context for context in cost.CONTEXTS if context <= most] or [most]
    whole = {tokens: cache.elements(tokens) * size for tokens in contexts}
    caches, offered = [CacheSize(bytes=whole)], None
    if window is None and not family.cached_width:
        for share in (0.5, 0.25):
            fewer = {tokens: round(share * count) for tokens, count in whole.items()}
            caches.append(CacheSize(kv_heads=share, bytes=fewer))
    why_not = no_windows(net)
    free = [a for a in attentions if a.kv_heads and why_not[a.path] is None]
    if window is None and free and net.is_backend_compatible():
        offered = Window(size=cost.usual_window(cost.usual_context(net)))
        each = size * sum(cache.per_token[a.path] for a in free)
        for share in (0.5, 0.75):
            beyond = {tokens: max(0, tokens - offered.size - offered.sinks) for tokens in contexts}
            near = {tokens: n - round(share * each * beyond[tokens]) for tokens, n in whole.items()}
            caches.append(CacheSize(windowed=share, bytes=near))
    return tuple(caches), offered


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
