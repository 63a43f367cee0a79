"""GPT-2: one fused ``c_attn`` = [Q; K; V], stored as Conv1D (in, out)."""

from headprune.families.spec import Family, Projection

GPT2 = Family(
    model_type="gpt2",
    attention="h.*.attn",
    projections=(Projection("c_attn", "qkv"), Projection("c_proj", "o")),
    # forward splits c_attn's output by split_size: one of Q, K, V
    follows={"num_heads": "query_heads", "split_size": "query_width"},
    query_heads_key="n_head",
    refused={"add_cross_attention": "cross attention of GPT-2 decoders is not in the table yet"},
)
