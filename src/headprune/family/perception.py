"""Encoders of images and sound, and CLIP, which has one of text beside one of images."""

from __future__ import annotations

from dataclasses import replace

from headprune.family.bert import BERT
from headprune.family.llama import QKVO
from headprune.family.spec import Family, Projection, settings

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
    knows=frozenset({"text_config", "vision_config", "logit_scale_init_value"}),
)

_CLIP_PART = {"self": "encoder.layers.*.self_attn"}

DINOV2 = replace(
    VIT,
    model_type="dinov2",
    attention={"self": "encoder.layer.*.attention"},
    min_transformers="5.18",
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
)

DINOV3 = Family(
    model_type="dinov3_vit",
    attention={"self": "layer.*.attention"},
    projections=QKVO,
    size_attributes={"num_heads": "query_heads"},
    expects_one_kv_per_query=True,
    knows=settings(
        """
        rope_theta query_bias key_bias value_bias proj_bias layerscale_value drop_path_rate
        use_gated_mlp num_register_tokens pos_embed_shift pos_embed_jitter pos_embed_rescale
        _out_features _out_indices apply_layernorm reshape_hidden_states
        """
    ),
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
    knows=settings(
        """
        use_mask_token use_absolute_position_embeddings use_shared_relative_position_bias
        layer_scale_init_value drop_path_rate use_mean_pooling out_indices pool_scales
        use_auxiliary_head auxiliary_loss_weight auxiliary_channels auxiliary_num_convs
        auxiliary_concat_input semantic_loss_ignore_index
        """
    ),
)

WAV2VEC2 = Family(
    model_type="wav2vec2",
    attention={"self": "encoder.layers.*.attention"},
    projections=CLIP.projections,
    size_attributes={"num_heads": "query_heads"},
    min_transformers="5.16",
    knows=settings(
        """
        feat_proj_dropout feat_quantizer_dropout final_dropout feat_extract_norm
        feat_extract_activation conv_dim conv_stride conv_kernel conv_bias num_conv_pos_embeddings
        num_conv_pos_embedding_groups do_stable_layer_norm num_codevectors_per_group
        num_codevector_groups contrastive_logits_temperature num_negatives codevector_dim
        proj_codevector_dim diversity_loss_weight ctc_loss_reduction ctc_zero_infinity tdnn_dim
        tdnn_kernel tdnn_dilation xvector_output_dim add_adapter adapter_kernel_size adapter_stride
        num_adapter_layers output_hidden_size adapter_attn_dim
        """
    ),
)

ROWS = (
    VIT,
    replace(VIT, model_type="deit"),
    replace(VIT, model_type="ijepa"),
    DINOV2,
    replace(
        DINOV2,
        model_type="dinov2_with_registers",
        knows=DINOV2.knows | {"num_register_tokens"},
    ),
    DINOV3,
    DATA2VEC_VISION,
    CLIP,
    replace(CLIP, model_type="clip_text_model", attention=_CLIP_PART),
    replace(CLIP, model_type="clip_vision_model", attention=_CLIP_PART),
    # its vision encoder ends in a pooling with attention of its own, which stays whole
    replace(CLIP, model_type="siglip"),
    replace(
        CLIP,
        model_type="siglip_vision_model",
        attention=_CLIP_PART,
        knows=frozenset({"vision_use_head"}),
    ),
    WAV2VEC2,
    replace(
        WAV2VEC2,
        model_type="hubert",
        knows=WAV2VEC2.knows | {"feat_proj_layer_norm", "conv_pos_batch_norm"},
    ),
    replace(
        WAV2VEC2,
        model_type="data2vec-audio",
        knows=WAV2VEC2.knows | {"conv_pos_kernel_size"},
    ),
    replace(
        WAV2VEC2, model_type="unispeech", knows=WAV2VEC2.knows | {"num_ctc_classes", "replace_prob"}
    ),
    replace(WAV2VEC2, model_type="sew", knows=WAV2VEC2.knows | {"squeeze_factor"}),
)
