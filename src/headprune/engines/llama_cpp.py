"""What llama.cpp's architectures hold of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Arch:
    """An architecture of llama.cpp.

    Attributes:
        name: Its name in the file.
        per_layer: Whether every layer may have its own numbers of heads.
        neighbours: Whether the rotary embedding turns neighbouring numbers, and not the halves of a
            head: rows of q and k lie in another order then.
        stacked: Whether q, k and v are one tensor, without biases.
        skips_attention: Whether a layer may have no heads at all; the first one never may.
    """

    name: str
    per_layer: bool = False
    neighbours: bool = False
    stacked: bool = False
    skips_attention: bool = False


_DECI = Arch("deci", per_layer=True, neighbours=True, skips_attention=True)
_OPENELM = Arch("openelm", per_layer=True, stacked=True)
# per model type: for the same heads in all layers, and for other heads in every layer
ARCHES: dict[str, tuple[Arch, Arch | None]] = {
    "llama": (Arch("llama", neighbours=True), _DECI),
    "mistral": (Arch("llama", neighbours=True), _DECI),
    "qwen2": (Arch("qwen2"), _DECI),
    "qwen3": (Arch("qwen3"), _OPENELM),
    "smollm3": (Arch("smollm3", neighbours=True), None),
}
_MOST_LAYERS = 512
_ROPE_TYPES = ("default", "llama3", "linear")


def refusal(config: PreTrainedConfig) -> str | None:
    """Why no architecture of llama.cpp holds a model of this config; None if one may."""
    kind = config.model_type
    if kind not in ARCHES:
        return f"its model_type is {kind}, and GGUF is written of {', '.join(ARCHES)}."
    if config.num_hidden_layers > _MOST_LAYERS:
        return f"it has {config.num_hidden_layers} layers, and llama.cpp takes {_MOST_LAYERS}."
    windows = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if windows or (kind == "mistral" and config.sliding_window is not None):
        return "its attention looks back through a sliding window, which this architecture has not."
    if config.hidden_act != "silu":
        return f"its MLP has the activation {config.hidden_act}, and llama.cpp computes silu there."
    scaled = rope(config)
    if scaled["rope_type"] not in _ROPE_TYPES or scaled.get("partial_rotary_factor", 1.0) != 1.0:
        return (
            f"its rotary embedding is {scaled['rope_type']}, of which llama.cpp's keys are unknown."
        )
    if kind == "qwen3" and config.attention_bias:
        return "its attention has biases, which llama.cpp's qwen3 and openelm have not."
    if kind == "smollm3" and [*config.no_rope_layers] != [
        int((layer + 1) % 4 != 0) for layer in range(config.num_hidden_layers)
    ]:
        return "its layers without rotary embedding are not every fourth, as in llama.cpp."
    return None


def uneven_refusal(config: PreTrainedConfig) -> str | None:
    """Why no architecture holds other heads in every layer; None if one may."""
    kind = config.model_type
    if ARCHES[kind][1] is None:
        return f"llama.cpp has no {kind} with counts per layer."
    if kind == "qwen3" and not config.tie_word_embeddings:
        return (
            "the one architecture of llama.cpp with norms of q and k and counts per layer "
            "(openelm) ties its embeddings, and this model does not."
        )
    return None


def rope(config: PreTrainedConfig) -> dict[str, Any]:
    """How positions are turned."""
    return {"rope_type": "default", **(config.rope_parameters or {})}
