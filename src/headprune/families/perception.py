"""Encoders of images and sound, and CLIP, which has one of text beside one of images."""

from __future__ import annotations

from dataclasses import replace

from headprune.families.llama import QKVO
from headprune.families.spec import Family, Projection

VIT = Family(
    model_type="vit",
    attention={"self": "layers.*.attention"},
    projections=QKVO,
    follows={"num_attention_heads": "query_heads"},
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
    follows={"num_heads": "query_heads"},
    knows=frozenset({"text_config", "vision_config", "logit_scale_init_value"}),
)

_CLIP_PART = {"self": "encoder.layers.*.self_attn"}

WAV2VEC2 = Family(
    model_type="wav2vec2",
    attention={"self": "encoder.layers.*.attention"},
    projections=CLIP.projections,
    follows={"num_heads": "query_heads"},
    since="5.16",
    knows=frozenset(
        """
        feat_proj_dropout feat_quantizer_dropout final_dropout feat_extract_norm
        feat_extract_activation conv_dim conv_stride conv_kernel conv_bias num_conv_pos_embeddings
        num_conv_pos_embedding_groups do_stable_layer_norm num_codevectors_per_group
        num_codevector_groups contrastive_logits_temperature num_negatives codevector_dim
        proj_codevector_dim diversity_loss_weight ctc_loss_reduction ctc_zero_infinity tdnn_dim
        tdnn_kernel tdnn_dilation xvector_output_dim add_adapter adapter_kernel_size adapter_stride
        num_adapter_layers output_hidden_size adapter_attn_dim
        """.split()  # noqa: SIM905
    ),
)

ROWS = (
    VIT,
    replace(VIT, model_type="deit"),
    replace(
        VIT,
        model_type="dinov2",
        attention={"self": "encoder.layer.*.attention"},
        since="5.18",
        knows=frozenset(
            {
                "mlp_ratio",
                "layerscale_value",
                "drop_path_rate",
                "use_swiglu_ffn",
                "_out_features",
                "_out_indices",
                "apply_layernorm",
                "reshape_hidden_states",
                "use_mask_token",
            }
        ),
    ),
    CLIP,
    replace(CLIP, model_type="clip_text_model", attention=_CLIP_PART),
    replace(CLIP, model_type="clip_vision_model", attention=_CLIP_PART),
    WAV2VEC2,
)
