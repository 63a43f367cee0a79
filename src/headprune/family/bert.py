"""BERT and the encoders after it."""

from __future__ import annotations

from dataclasses import replace

from headprune.family.llama import QKVO, llama_like
from headprune.family.spec import Family, Projection

_CROSS = "cross attention of decoders on their own is not in the table yet"

BERT = Family(
    model_type="bert",
    attention={"self": "encoder.layer.*.attention.self"},
    projections=(
        Projection("query", "q"),
        Projection("key", "k"),
        Projection("value", "v"),
        Projection("../output.dense", "o"),
    ),
    head_dim="attention_head_size",
    size_attributes={"num_attention_heads": "query_heads", "all_head_size": "query_width"},
    refused={"add_cross_attention": _CROSS},
)

ALBERT = replace(
    BERT,
    model_type="albert",
    # one layer's weights run in every layer, so a head leaves all layers at once
    attention={"self": "encoder.albert_layer_groups.*.albert_layers.*.attention"},
    projections=(*BERT.projections[:3], Projection("dense", "o")),
    headless_output="LayerNorm",
)

DISTILBERT = Family(
    model_type="distilbert",
    attention={"self": "transformer.layer.*.attention"},
    projections=(
        Projection("q_lin", "q"),
        Projection("k_lin", "k"),
        Projection("v_lin", "v"),
        Projection("out_lin", "o"),
    ),
    head_dim="attention_head_size",
    size_attributes={"n_heads": "query_heads", "dim": "query_width"},
    query_heads_key="n_heads",
)

DEBERTA_V2 = replace(
    BERT,
    model_type="deberta-v2",
    projections=(
        Projection("query_proj", "q"),
        Projection("key_proj", "k"),
        Projection("value_proj", "v"),
        # what content and position say of each other; absent where it shares the ones above
        Projection("pos_key_proj", "k", optional=True),
        Projection("pos_query_proj", "q", optional=True),
        Projection("../output.dense", "o"),
    ),
    fewer_kv_heads="its disentangled attention scores Q and K head by head and has no repeat",
    refused={},
)

MODERNBERT = Family(
    model_type="modernbert",
    attention={"self": "layers.*.attn"},
    projections=(Projection("Wqkv", "qkv"), Projection("Wo", "o")),
    expects_one_kv_per_query=True,
)

MPNET = Family(
    model_type="mpnet",
    attention={"self": "encoder.layer.*.attention.attn"},
    projections=(
        Projection("q", "q"),
        Projection("k", "k"),
        Projection("v", "v"),
        Projection("o", "o"),
    ),
    head_dim="attention_head_size",
    size_attributes={"num_attention_heads": "query_heads", "all_head_size": "query_width"},
    head_arguments={"position_bias": 1},
    expects_one_kv_per_query=True,
)

ESM = replace(
    BERT,
    model_type="esm",
    refused={
        **BERT.refused,
        "is_folding_model": "its folding trunk has attention of its own; cut the language model "
        "(EsmModel) without it",
    },
)

NOMIC_BERT = Family(
    model_type="nomic_bert",
    attention={"self": "layers.*.self_attn"},
    projections=QKVO,
    native=True,
    fewer_kv_heads="its checkpoints hold Q, K and V as one tensor, read as three equal parts",
)

ROWS = (
    BERT,
    replace(BERT, model_type="roberta"),
    replace(BERT, model_type="camembert"),
    replace(BERT, model_type="data2vec-text"),
    replace(BERT, model_type="roberta-prelayernorm"),
    replace(BERT, model_type="xlm-roberta"),
    replace(BERT, model_type="xlm-roberta-xl"),
    replace(BERT, model_type="ernie"),
    ESM,
    replace(BERT, model_type="electra"),
    ALBERT,
    DISTILBERT,
    DEBERTA_V2,
    MODERNBERT,
    MPNET,
    NOMIC_BERT,
    replace(NOMIC_BERT, model_type="gte"),
    replace(NOMIC_BERT, model_type="jina_embeddings_v3"),
    llama_like("eurobert"),
)
