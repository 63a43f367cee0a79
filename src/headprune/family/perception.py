"""Encoders of images and sound, and CLIP, which has one of text beside one of images."""

from __future__ import annotations

from dataclasses import replace

from headprune.family.bert import BERT
from headprune.family.llama import QKVO
from headprune.family.spec import Family, Projection

VIT = Family(
    model_type="vit",
    attention={"self": "layers.*.attention"},
    projections=QKVO,
    size_attributes={"num_attention_heads": "query_heads"},
    native=True,
)

CLIP = Family(
    model_type="clip",
    attention={
        "text": "text_model.encoder.layers.*.self_attn",
        "vision": "vision_model.encoder.layers.*.self_attn",
    },
    projections=(
        Projection("q_proj", "q"),
        Projection("k_proj", "k"),
        Projection("v_proj", "v"),
        Projection("out_proj", "o"),
    ),
    size_attributes={"num_heads": "query_heads"},
)

_CLIP_PART = {"self": "encoder.layers.*.self_attn"}

DINOV2 = replace(
    VIT,
    model_type="dinov2",
    attention={"self": "encoder.layer.*.attention"},
    min_transformers="5.18",
)

DINOV3 = Family(
    model_type="dinov3_vit",
    attention={"self": "layer.*.attention"},
    projections=QKVO,
    size_attributes={"num_heads": "query_heads"},
    expects_one_kv_per_query=True,
)

DATA2VEC_VISION = Family(
    model_type="data2vec-vision",
    attention={"self": "encoder.layer.*.attention.attention"},
    projections=BERT.projections,
    head_dim=BERT.head_dim,
    size_attributes=BERT.size_attributes,
    head_arguments={"relative_position_bias": 1},
    expects_one_kv_per_query=True,
    refused={
        "use_relative_position_bias": "each layer has a table of position biases with a column per "
        "head, which the table of families has no word for"
    },
)

WAV2VEC2 = Family(
    model_type="wav2vec2",
    attention={"self": "encoder.layers.*.attention"},
    projections=CLIP.projections,
    size_attributes={"num_heads": "query_heads"},
    min_transformers="5.16",
)

ROWS = (
    VIT,
    replace(VIT, model_type="deit"),
    replace(VIT, model_type="ijepa"),
    DINOV2,
    replace(DINOV2, model_type="dinov2_with_registers"),
    DINOV3,
    DATA2VEC_VISION,
    CLIP,
    replace(CLIP, model_type="clip_text_model", attention=_CLIP_PART),
    replace(CLIP, model_type="clip_vision_model", attention=_CLIP_PART),
    # its vision encoder ends in a pooling with attention of its own, which stays whole
    replace(CLIP, model_type="siglip"),
    replace(CLIP, model_type="siglip_vision_model", attention=_CLIP_PART),
    WAV2VEC2,
    replace(WAV2VEC2, model_type="hubert"),
    replace(WAV2VEC2, model_type="data2vec-audio"),
    replace(WAV2VEC2, model_type="unispeech"),
    replace(WAV2VEC2, model_type="sew"),
)
