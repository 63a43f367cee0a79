"""Llama: separate q, k, v and o, grouped queries, rotary embedding."""

from headprune.families.spec import Family, Projection

LLAMA = Family(
    model_type="llama",
    attention="layers.*.self_attn",
    projections=(
        Projection("q_proj", "q"),
        Projection("k_proj", "k"),
        Projection("v_proj", "v"),
        Projection("o_proj", "o"),
    ),
    follows={"num_key_value_groups": "queries_per_kv"},
    kv_heads_key="num_key_value_heads",
    native_uniform=True,  # LlamaConfig has head_dim, so hidden_size need not be heads x head_dim
)
