"""Engines, and the shapes of results that they hold.

Plans keep to this table, exports and model cards follow it, and the docs show it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedConfig, PreTrainedModel

from headprune.config import Target
from headprune.model.attention import attention_of, family_of
from headprune.model.loading import task_of
from headprune.model.probes import probe_inputs
from headprune.surgery.layer_windows import no_layer_windows

EVEN, KV_COUNTS, QUERY_COUNTS = "plain config", "KV heads per layer", "query heads per layer"
RAGGED, EMPTY = "ragged groups", "layer without attention"
LAYER_WINDOWS, HEAD_WINDOWS = "windows of layers", "windows of heads, or with sink tokens"
SHAPES = (EVEN, KV_COUNTS, QUERY_COUNTS, RAGGED, EMPTY, LAYER_WINDOWS, HEAD_WINDOWS)
NO = "no"
_TEXT = {"input_ids", "attention_mask", "decoder_input_ids"}
_ROPE_TYPES = ("default", "llama3", "linear")

ARCHES: dict[str, tuple[str, str | None]] = {
    "llama": ("llama", "deci"),
    "mistral": ("llama", "deci"),
    "qwen2": ("qwen2", "deci"),
    "qwen3": ("qwen3", "openelm"),
    "smollm3": ("smollm3", None),
    "ministral": ("llama", "deci"),
    "granite_swa": ("granite_swa", None),
}
"""llama.cpp's architectures by model type: for plain configs, and for counts per layer."""
WINDOWED_ARCH = "granite_swa"
"""llama.cpp's one architecture that windows any layers: Llama's, with a sink logit per head."""
_WINDOWED = ("llama", "mistral", "ministral", "qwen2", WINDOWED_ARCH)


@dataclass(frozen=True)
class EngineShapes:
    """An engine that runs results.

    Attributes:
        name: The engine.
        way: The way into it.
        tested: The version that ran the cells.
        cells: Per shape: "yes", "no", or the name of its substitute.
        refusal: Return why the engine takes no result of a model, as the end of a sentence.
        limits: Return the shapes that it takes only of other models, each with the reason.
        zero_heads: Empty layers that get a zero head, which costs as much as a kept one.
    """

    name: str
    way: str
    tested: str
    cells: Mapping[str, str]
    refusal: Callable[[PreTrainedModel], str | None]
    limits: Callable[[PreTrainedModel], Mapping[str, str]] = lambda net: {}
    zero_heads: Literal["none", "first", "every"] = "none"

    def holds(self, net: PreTrainedModel) -> frozenset[str]:
        """Return the shapes that it takes of a model."""
        if self.refusal(net) is not None:
            return frozenset()
        return frozenset(s for s in SHAPES if self.cells[s] != NO and s not in self.limits(net))


def generates_none(net: PreTrainedModel) -> str | None:
    """Return why an engine of generated text takes no such model; None if it does."""
    if task_of(net) == "causal-lm":
        return None
    return f"a {type(net).__name__} generates no text, and this engine is for models that do."


def vllm_refusal(net: PreTrainedModel) -> str | None:
    """Return why vLLM is not advised for a model; None if it is."""
    if getattr(net.config.get_text_config(decoder=True), "kv_lora_rank", None):
        return "its keys and values are made of one latent (MLA), which the backend does not cache."
    return generates_none(net)


def graph_refusal(net: PreTrainedModel) -> str | None:
    """Return why a model has no graph; None if nothing is known against it."""
    strange = sorted(set(probe_inputs(net)) - _TEXT)
    if strange:
        return f"a {type(net).__name__} takes {', '.join(strange)}; models of text alone fit."
    if "'dynamic'" in str(getattr(net.config.get_text_config(), "rope_parameters", "")):
        return "its rope changes with the length of a text (dynamic), and a graph holds one length."
    return None


def zero_heads_refusal(net: PreTrainedModel) -> str | None:
    """Return why a model takes no zero heads; None if it does."""
    family = family_of(net.config)
    roles = {p.holds for a in attention_of(net) for p in a.projections if p.holds}
    if family.per_head or family.full_width_norms or roles != set("qkvo"):
        return (
            "zero heads need separate projections of q, k, v and the output, and a "
            f"{family.model_type} has more tensors with a part per head."
        )
    return None


def llama_cpp_refusal(net: PreTrainedModel) -> str | None:
    """Return why no architecture of llama.cpp holds a model; None if one may."""
    config = net.config
    kind = config.model_type
    if kind not in ARCHES:
        return f"its model_type is {kind}, and GGUF is written of {', '.join(ARCHES)}."
    types = getattr(config, "layer_types", None) or ()
    if kind != "mistral" and "sliding_attention" in types:
        reason = no_layer_windows(config) or windows_refusal(config)
        if reason is not None:
            return reason
    if kind == WINDOWED_ARCH and (
        {config.embedding_multiplier, config.residual_multiplier, config.logits_scaling} != {1.0}
        or {*config.layer_rope_theta} != {config.rope_parameters["rope_theta"]}
        or config.sliding_window is None
    ):
        return "it is no Llama with windows: use llama.cpp's convert_hf_to_gguf.py."
    if config.hidden_act != "silu":
        return f"its MLP has the activation {config.hidden_act}, and llama.cpp computes silu there."
    scaled = rope(config)
    if scaled["rope_type"] not in _ROPE_TYPES or scaled.get("partial_rotary_factor", 1.0) != 1.0:
        return f"llama.cpp's keys for its rotary embedding ({scaled['rope_type']}) are unknown."
    if kind == "qwen3" and config.attention_bias:
        return "its attention has biases, and llama.cpp's qwen3 and openelm have none."
    if kind == "smollm3" and [*config.no_rope_layers] != [
        int((layer + 1) % 4 != 0) for layer in range(config.num_hidden_layers)
    ]:
        return "its layers without rotary embedding are not every fourth, as in llama.cpp."
    return generates_none(net)


def windowed_layers(config: PreTrainedConfig) -> list[bool]:
    """Return for every layer whether it has a window."""
    count = config.num_hidden_layers
    if config.model_type == "mistral":  # all of them, whatever layer_types say
        return [config.sliding_window is not None] * count
    types = getattr(config, "layer_types", None) or [None] * count
    return [kind == "sliding_attention" for kind in types]


def windows_refusal(config: PreTrainedConfig) -> str | None:
    """Return why llama.cpp holds no windows of whole layers of a model; None if it does."""
    if config.model_type in _WINDOWED:
        return None
    return (
        f"llama.cpp has windows in chosen layers of {', '.join(_WINDOWED)}, and this is a "
        f"{config.model_type}: vLLM takes them."
    )


def uneven_refusal(config: PreTrainedConfig) -> str | None:
    """Return why llama.cpp holds no counts per layer of a model; None if it does."""
    kind = config.model_type
    if any(windowed_layers(config)):
        return f"{WINDOWED_ARCH}, which has the windows of its layers, has equal heads in all."
    if ARCHES[kind][1] is None:
        return f"llama.cpp has no {kind} with counts per layer."
    if kind == "qwen3" and not config.tie_word_embeddings:
        return (
            "llama.cpp has one architecture with norms of q and k and counts per layer, openelm. "
            "That ties its embeddings, and this model does not."
        )
    return None


def rope(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings of the rotary embedding."""
    return {"rope_type": "default", **(config.rope_parameters or {})}


def _where(reason: str | None, *shapes: str) -> dict[str, str]:
    return {} if reason is None else dict.fromkeys(shapes, reason)


_ALL = {**dict.fromkeys(SHAPES, "yes"), LAYER_WINDOWS: NO, HEAD_WINDOWS: NO}
TARGETS: dict[Target, EngineShapes] = {
    Target.LLAMA_CPP: EngineShapes(
        "llama.cpp",
        "`export --to gguf`",
        "xllamacpp 2026.10",
        {
            **{**_ALL, LAYER_WINDOWS: "yes: Llama, Mistral, Qwen2"},
            **{RAGGED: "zero query heads", EMPTY: "yes; a zero head in layer 0"},
        },
        llama_cpp_refusal,
        lambda net: {
            **_where(uneven_refusal(net.config), KV_COUNTS, QUERY_COUNTS, EMPTY),
            **_where(no_layer_windows(net.config) or windows_refusal(net.config), LAYER_WINDOWS),
        },
        "first",
    ),
    Target.VLLM: EngineShapes(
        "vLLM",
        "transformers backend",
        "0.32.0, CPU",
        {
            **{**_ALL, LAYER_WINDOWS: "yes"},
            **{RAGGED: "`export --to vllm`", EMPTY: "`export --to vllm`; a zero head"},
        },
        vllm_refusal,
        lambda net: {
            **_where(zero_heads_refusal(net), RAGGED, EMPTY),
            **_where(no_layer_windows(net.config), LAYER_WINDOWS),
        },
        "every",
    ),
    Target.ONNX: EngineShapes("ONNX Runtime", "`export --to onnx`", "1.32.0", _ALL, graph_refusal),
    Target.OPENVINO: EngineShapes(
        "OpenVINO", "`export --to openvino`", "2026.4.1, CPU", _ALL, graph_refusal
    ),
    Target.ANYWHERE: EngineShapes(
        "others",
        "as the original",
        "transformers 5.23.0",
        {**dict.fromkeys(SHAPES, NO), EVEN: "yes", LAYER_WINDOWS: "yes"},
        lambda net: None,
        lambda net: _where(no_layer_windows(net.config), LAYER_WINDOWS),
    ),
}


def shapes_of(
    groups: Sequence[Sequence[int]], plain: bool, windows: str | None = None
) -> frozenset[str]:
    """Return the shapes that an engine must hold for a result.

    Args:
        groups: Per attention module, the number of queries of every KV head.
        plain: Whether a plain config describes the result.
        windows: The shape of its windows; None without any.
    """
    if windows is not None:
        return frozenset({windows})
    if plain:
        return frozenset({EVEN})
    present = [group for group in groups if group]
    needs = {
        KV_COUNTS: len({len(group) for group in present}) > 1,
        # ragged groups are padded to the largest
        QUERY_COUNTS: len({(sum(group), max(group) * len(group)) for group in present}) > 1,
        RAGGED: any(len(set(group)) > 1 for group in present),
        EMPTY: len(present) < len(groups),
    }
    # equal counts that no plain config describes
    return frozenset(shape for shape, needed in needs.items() if needed) or frozenset(
        {QUERY_COUNTS}
    )
