"""GPT-2 and the decoders after it that have one KV head per query head, or one in all."""

from headprune.family.spec import Family, Projection

_QUERY_KEY_VALUE = (
    Projection("query_key_value", "qkv", interleaved_per_kv_head=True),
    Projection("dense", "o"),
)

_CROSS = "cross attention of decoders on their own is not in the table yet"
_SEPARATE = (
    Projection("q_proj", "q"),
    Projection("k_proj", "k"),
    Projection("v_proj", "v"),
    Projection("out_proj", "o"),
)

GPT2 = Family(
    model_type="gpt2",
    attention={"self": "h.*.attn"},
    # one fused c_attn = [Q; K; V], stored as Conv1D (in, out)
    projections=(Projection("c_attn", "qkv"), Projection("c_proj", "o")),
    # forward splits c_attn's output by split_size: one of Q, K, V
    size_attributes={"num_heads": "query_heads", "split_size": "query_width"},
    query_heads_key="n_head",
    expects_one_kv_per_query=True,
    refused={"add_cross_attention": _CROSS},
)

GPT_BIGCODE = Family(
    model_type="gpt_bigcode",
    attention={"self": "h.*.attn"},
    # [Q; k; v] for multi-query, else [q k v] per head: one rule
    projections=(
        Projection("c_attn", "qkv", interleaved_per_kv_head=True),
        Projection("c_proj", "o"),
    ),
    size_attributes={
        "num_heads": "query_heads",
        "kv_heads": "kv_heads",
        "kv_dim": "kv_width",
        "embed_dim": "query_width",
        "split_size": "query_width",
        "num_key_value_groups": "queries_per_kv",
    },
    query_heads_key="n_head",
    fewer_kv_heads="one KV head is what multi_query stands for, and it knows no other number",
    refused={"add_cross_attention": _CROSS},
)

GPT_NEO = Family(
    model_type="gpt_neo",
    attention={"self": "h.*.attn.attention"},
    projections=_SEPARATE,
    size_attributes={"num_heads": "query_heads"},
    query_heads_key="num_heads",
    expects_one_kv_per_query=True,
)

GPTJ = Family(
    model_type="gptj",
    attention={"self": "h.*.attn"},
    projections=_SEPARATE,
    size_attributes={"num_attention_heads": "query_heads"},
    query_heads_key="n_head",
    expects_one_kv_per_query=True,
)

GPT_NEOX = Family(
    model_type="gpt_neox",
    attention={"self": "layers.*.attention"},
    projections=_QUERY_KEY_VALUE,
    head_dim="head_size",
    expects_one_kv_per_query=True,
)

OPT = Family(
    model_type="opt",
    attention={"self": "decoder.layers.*.self_attn"},
    projections=_SEPARATE,
    size_attributes={"num_heads": "query_heads"},
    expects_one_kv_per_query=True,
)

BLOOM = Family(
    model_type="bloom",
    attention={"self": "h.*.self_attention"},
    projections=_QUERY_KEY_VALUE,
    size_attributes={"num_heads": "query_heads"},
    head_arguments={"alibi": "batch"},
    headless_output="residual",
    query_heads_key="n_head",
    expects_one_kv_per_query=True,
    refused={
        "slow_but_exact": "it multiplies slices of W_O of a fixed width; set it to false in "
        "config.json, which changes the outputs by rounding only"
    },
)

MPT = Family(
    model_type="mpt",
    attention={"self": "blocks.*.attn"},
    projections=(Projection("Wqkv", "qkv"), Projection("out_proj", "o")),
    size_attributes={"n_heads": "query_heads"},
    head_arguments={"position_bias": 0},
    query_heads_key="n_heads",
    expects_one_kv_per_query=True,
)

FALCON = Family(
    model_type="falcon",
    attention={"self": "h.*.self_attention"},
    # [q k v] per head (old), [Q; k; v] (multi-query), [q ... q k v] per group (new): one rule
    projections=_QUERY_KEY_VALUE,
    size_attributes={"num_heads": "query_heads", "num_kv_heads": "kv_heads"},
    # with alibi and sdpa the bias of every head is folded into the mask
    head_arguments={"alibi": "batch", "attention_mask": 1},
    fewer_kv_heads="the old layouts have no place for it, and the new one caches K and V of every "
    "query head, so nothing is saved",
    caches_query_heads="new_decoder_architecture",
)

BIOGPT = Family(
    model_type="biogpt",
    attention={"self": "layers.*.self_attn"},
    projections=_SEPARATE,
    size_attributes={"num_heads": "query_heads"},
)

XGLM = Family(
    model_type="xglm",
    attention={"self": "layers.*.self_attn"},
    projections=_SEPARATE,
    size_attributes={"num_heads": "query_heads", "embed_dim": "query_width"},
    query_heads_key="attention_heads",
    expects_one_kv_per_query=True,
    refused={"add_cross_attention": _CROSS},
)

PERSIMMON = Family(
    model_type="persimmon",
    attention={"self": "layers.*.self_attn"},
    projections=_QUERY_KEY_VALUE,
    size_attributes={"num_heads": "query_heads"},
    expects_one_kv_per_query=True,
)

ROWS = (
    GPT2,
    GPT_BIGCODE,
    GPT_NEO,
    GPTJ,
    GPT_NEOX,
    OPT,
    BLOOM,
    MPT,
    FALCON,
    BIOGPT,
    XGLM,
    PERSIMMON,
)
