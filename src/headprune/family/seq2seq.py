"""Encoder-decoders, with three kinds of attention: encoder, decoder, and cross."""

from __future__ import annotations

from dataclasses import replace

from headprune.family.spec import Family, Projection

BART = Family(
    model_type="bart",
    attention={
        "encoder": "encoder.layers.*.self_attn",
        "decoder": "decoder.layers.*.self_attn",
        "cross": "decoder.layers.*.encoder_attn",
    },
    projections=(
        Projection("q_proj", "q"),
        Projection("k_proj", "k"),
        Projection("v_proj", "v"),
        Projection("out_proj", "o"),
    ),
    size_attributes={"num_heads": "query_heads"},
)

T5 = Family(
    model_type="t5",
    attention={
        "encoder": "encoder.block.*.layer.0.SelfAttention",
        "decoder": "decoder.block.*.layer.0.SelfAttention",
        "cross": "decoder.block.*.layer.1.EncDecAttention",
    },
    projections=(
        Projection("q", "q"),
        Projection("k", "k"),
        Projection("v", "v"),
        Projection("o", "o"),
    ),
    head_dim="key_value_proj_dim",
    size_attributes={"n_heads": "query_heads", "inner_dim": "query_width"},
    head_arguments={"position_bias": 1},
    shares_position_bias=True,
    query_heads_key="num_heads",
    min_transformers="5.15",
)

ROWS = (
    BART,
    replace(BART, model_type="mbart"),
    replace(BART, model_type="pegasus"),
    replace(BART, model_type="m2m_100"),  # NLLB-200 says so as well
    replace(BART, model_type="blenderbot"),
    replace(BART, model_type="marian"),
    replace(BART, model_type="whisper", expects_one_kv_per_query=True),
    T5,
    replace(T5, model_type="mt5"),
)
