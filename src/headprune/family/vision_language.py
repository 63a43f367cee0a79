"""Models of images and text. Their language model is cut; the vision encoder stays whole."""

from __future__ import annotations

from headprune.family.llama import llama_like
from headprune.family.spec import Family

_IMAGE = {
    "text_config",
    "vision_config",
    "image_token_index",
    "image_token_id",
    "image_seq_length",
    "projector_hidden_act",
    "vision_feature_select_strategy",
    "vision_feature_layer",
    "multimodal_projector_bias",
}


def vision_language(model_type: str, knows: set[str], path: str = "language_model") -> Family:
    """A row for a model whose language part is laid out like Llama.

    Args:
        model_type: ``config.model_type`` of the whole.
        knows: Config attributes of its own that do not touch heads.
        path: Where the language part is, below the base model.
    """
    return llama_like(
        model_type,
        _IMAGE | knows,
        attention={"text": f"{path}.layers.*.self_attn"},
        native=False,  # the counts stand in text_config
        fewer_kv_heads="runtime",
    )


_QWEN = {"image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"}

ROWS = (
    vision_language("llava", set()),
    vision_language("llava_next", {"image_grid_pinpoints"}),
    vision_language(
        "llava_onevision", {"image_grid_pinpoints", "video_token_index", "vision_aspect_ratio"}
    ),
    vision_language("gemma3", {"mm_tokens_per_image", "boi_token_index", "eoi_token_index"}),
    vision_language("paligemma", set()),
    vision_language("mistral3", {"spatial_merge_size"}),
    vision_language("internvl", {"downsample_ratio"}),
    vision_language("qwen2_vl", _QWEN),
    vision_language("qwen2_5_vl", _QWEN),
    vision_language("qwen3_vl", _QWEN),
    vision_language("qwen3_vl_moe", _QWEN),
    vision_language("idefics2", {"perceiver_config"}, path="text_model"),
    vision_language("idefics3", {"scale_factor"}, path="text_model"),
    vision_language("smolvlm", {"scale_factor"}, path="text_model"),
)
