"""Models of images and text. Their language model is cut; the vision encoder stays whole."""

from __future__ import annotations

from headprune.family.llama import llama_like
from headprune.family.spec import Family


def vision_language(model_type: str, path: str = "language_model") -> Family:
    """Return the row of a model with a language part laid out like Llama.

    Args:
        model_type: ``config.model_type`` of the whole.
        path: Where the language part is, below the base model.
    """
    return llama_like(
        model_type,
        attention={"text": f"{path}.layers.*.self_attn"},
        native=False,  # the counts stand in text_config
        fewer_kv_heads="runtime",
    )


ROWS = (
    vision_language("llava"),
    vision_language("llava_next"),
    vision_language("llava_onevision"),
    vision_language("gemma3"),
    vision_language("paligemma"),
    vision_language("mistral3"),
    vision_language("internvl"),
    vision_language("qwen2_vl"),
    vision_language("qwen2_5_vl"),
    vision_language("qwen3_vl"),
    vision_language("qwen3_vl_moe"),
    vision_language("idefics2", path="text_model"),
    vision_language("idefics3", path="text_model"),
    vision_language("smolvlm", path="text_model"),
)
