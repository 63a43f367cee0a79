"""Windows of whole layers, as the plain config of a stock class says them.

Only some classes follow ``layer_types`` in their masks and caches. Llama's builds a full mask
whatever these say, and Ministral is the same model that does follow them.
"""

from __future__ import annotations

from collections.abc import Collection

from transformers import CONFIG_MAPPING, PreTrainedConfig

HELD_BY = {
    **dict.fromkeys(("llama", "mistral"), "ministral"),
    **{kind: kind for kind in ("ministral", "qwen2", "qwen2_moe", "qwen3", "smollm3")},
    **{kind: kind for kind in ("gemma2", "vaultgemma", "granite_swa")},
}
"""The model type that holds layers with a window and full ones, by the type of the original."""

WITH_LOGITS = dict.fromkeys(("ministral", "qwen2"), "granite_swa")
"""The model type that holds them with a sink logit for each query head, by the type of these."""

SETTINGS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
"""The settings of a config that say its windows."""

_FULL, _NEAR = "full_attention", "sliding_attention"
# settings of Llama without a place in Ministral, with the values that change nothing
_LEFT_OUT = {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}
OF_CLASS = ("model_type", "architectures", "transformers_version")


def classes_of(kind: str) -> set[str]:
    """Return the model types of a model of some type with windows of layers, and itself."""
    held = HELD_BY.get(kind, kind)
    return {kind, held, WITH_LOGITS.get(held, held)}


def no_layer_windows(config: PreTrainedConfig, size: int | None = None) -> str | None:
    """Return why no plain config holds windows of layers of a model; None if one does.

    Args:
        config: Its config.
        size: Tokens of the window; None for one that suits the model.
    """
    kind = config.model_type
    if getattr(config, "headprune", None) is not None:
        return "its heads are uneven, and need the code that travels with them."
    if kind not in HELD_BY:
        return (
            f"no class of transformers is a {kind} with windows in chosen layers. --sinks 4 makes "
            "a result that carries its code."
        )
    types = {*(getattr(config, "layer_types", None) or [])}
    if kind == "llama" and _NEAR in types:
        return (
            "its layer_types name windows, which Llama's class ignores: write "
            '"model_type": "ministral" for windows, or leave layer_types out.'
        )
    if not types <= {_FULL, _NEAR}:
        return f"some of its layers are {', '.join(sorted(types - {_FULL, _NEAR}))}."
    if size == 1:
        return "a plain config holds no window of 1 token: give a larger --window."
    if kind == "mistral" and config.sliding_window is not None:
        return f"all of its layers have a window of {config.sliding_window:,} tokens already."
    if _NEAR in types and size not in (None, config.sliding_window):
        return (
            f"its config holds windows of one size, and some of its layers have one of "
            f"{config.sliding_window:,} tokens: give --window {config.sliding_window}."
        )
    if HELD_BY[kind] == kind:
        return None
    for name, usual in _LEFT_OUT.items():
        if getattr(config, name, usual) not in (usual, None):
            return f"{HELD_BY[kind]}, which would hold them, has no {name}."
    return None


def with_windows(config: PreTrainedConfig, layers: Collection[int], size: int) -> PreTrainedConfig:
    """Return the config of a model whose layers see the latest tokens only, of a class that obeys.

    Args:
        config: Its config, for which ``no_layer_windows`` has no reason.
        layers: Numbers of these layers.
        size: Tokens that they see, with the current one.
    """
    types = getattr(config, "layer_types", None) or [_FULL] * config.num_hidden_layers
    settings = {name: v for name, v in config.to_dict().items() if name not in OF_CLASS}
    if HELD_BY[config.model_type] != config.model_type:
        settings = {name: v for name, v in settings.items() if name not in _LEFT_OUT}
        # left out by Llama, and computed by no Ministral
        settings["head_dim"] = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
    settings |= {
        "layer_types": [_NEAR if n in layers else kind for n, kind in enumerate(types)],
        "sliding_window": size,
    }
    if "use_sliding_window" in settings:
        # vLLM ignores windows where the second is the number of layers
        settings |= {"use_sliding_window": True, "max_window_layers": 0}
    made = CONFIG_MAPPING[HELD_BY[config.model_type]].from_dict(settings)
    made.name_or_path, made._attn_implementation = config.name_or_path, config._attn_implementation
    return made
