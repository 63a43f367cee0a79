"""Llama, and the decoders laid out like it: separate q, k, v and o, grouped queries, rotary."""

from __future__ import annotations

from typing import Any

from headprune.family.spec import Family, Projection

QKVO = (
    Projection("q_proj", "q"),
    Projection("k_proj", "k"),
    Projection("v_proj", "v"),
    Projection("o_proj", "o"),
)


def llama_like(model_type: str, knows: set[str] | None = None, **differences: Any) -> Family:
    """A row that differs from Llama's in what is given.

    Args:
        model_type: ``config.model_type`` of the family.
        knows: Config attributes of its own that do not touch heads.
        **differences: Other fields of ``Family``.
    """
    llama: dict[str, Any] = {
        "attention": {"self": "layers.*.self_attn"},
        "projections": QKVO,
        "size_attributes": {"num_key_value_groups": "queries_per_kv"},
        "kv_heads_key": "num_key_value_heads",
        # the config has head_dim, so hidden_size need not be heads x head_dim
        "native": True,
        "fewer_kv_heads": "native",
    }
    return Family(model_type=model_type, knows=frozenset(knows or ()), **{**llama, **differences})


_BIDIRECTIONAL = {"use_bidirectional_attention": "it attends in both directions, which is untested"}
_GRANITE = {"embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"}
_QWEN_MOE = {"decoder_sparse_step", "num_experts", "mlp_only_layers"}
_MOE = {"n_shared_experts", "n_routed_experts", "routed_scaling_factor", "n_group", "topk_group"}
# both norms run over all heads at once
_FULL_WIDTH_NORMS: dict[str, Any] = {
    "full_width_norms": {"q_norm": "q", "k_norm": "k"},
    "projections": (
        Projection("q_proj", ""),
        Projection("k_proj", ""),
        Projection("v_proj", "v"),
        Projection("o_proj", "o"),
    ),
    "native": False,
    "fewer_kv_heads": "a norm runs over all K heads at once and would see other heads",
}

ROWS = (
    llama_like("llama"),
    llama_like("mistral"),
    llama_like("mixtral", {"router_jitter_noise"}),
    llama_like("qwen2"),
    llama_like("qwen3"),
    llama_like("qwen3_moe", _QWEN_MOE),
    llama_like("gemma", {"use_bidirectional_attention"}),
    llama_like("gemma2", refused=_BIDIRECTIONAL),
    llama_like("gemma3_text", refused=_BIDIRECTIONAL),
    llama_like("smollm3", {"no_rope_layers", "no_rope_layer_interval"}),
    llama_like("granite", _GRANITE),
    llama_like("starcoder2", {"norm_epsilon", "residual_dropout", "use_bias"}),
    llama_like("gpt_oss", {"swiglu_alpha", "swiglu_limit"}, per_head={"sinks": "q"}),
    llama_like(
        "cohere",
        {"use_qk_norm"},
        per_head={"q_norm.weight": "q", "k_norm.weight": "k"},
    ),
    llama_like("olmo2", **_FULL_WIDTH_NORMS),
    llama_like("olmo3", **_FULL_WIDTH_NORMS),
    llama_like("olmoe", {"clip_qkv", "num_experts"}, **_FULL_WIDTH_NORMS),
    llama_like(
        "stablelm",
        {"use_qkv_bias", "qk_layernorm"},
        per_head={"q_layernorm.norms": "q", "k_layernorm.norms": "k"},
        size_attributes={
            "num_heads": "query_heads",
            "num_key_value_heads": "kv_heads",
            "num_key_value_groups": "queries_per_kv",
        },
        native=False,  # head_dim is hidden_size / num_attention_heads
        fewer_kv_heads="runtime",
    ),
    llama_like(
        "phi",
        {"qk_layernorm"},
        projections=(*QKVO[:3], Projection("dense", "o")),
        native_unless=("qk_layernorm",),  # its norms are hidden_size / num_attention_heads wide
    ),
    llama_like(
        "phi3",
        {"original_max_position_embeddings"},
        projections=(Projection("qkv_proj", "qkv"), Projection("o_proj", "o")),
        size_attributes={
            "num_key_value_heads": "kv_heads",
            "num_key_value_groups": "queries_per_kv",
        },
        config_size_attributes={"num_attention_heads": "query_heads"},
    ),
    llama_like("apertus"),
    llama_like("arcee"),
    llama_like("cohere2"),
    llama_like("ernie4_5", {"use_bias"}),
    llama_like(
        "ernie4_5_moe",
        {
            "use_bias",
            "moe_k",
            "moe_num_experts",
            "moe_num_shared_experts",
            "moe_layer_start_index",
            "moe_layer_end_index",
            "moe_layer_interval",
            "moe_norm_min",
        },
    ),
    llama_like("exaone4", {"sliding_window_pattern"}),
    llama_like("glm"),
    llama_like("glm4"),
    llama_like("glm4_moe", {*_MOE, "first_k_dense_replace", "use_qk_norm", "num_mtp_layers"}),
    llama_like("granitemoe", _GRANITE),
    llama_like("hunyuan_v1_dense", {"eod_token_id"}),
    llama_like("hunyuan_v1_moe", {"eod_token_id", "sep_token_id", "num_experts", "moe_topk"}),
    llama_like("jais2"),
    llama_like("ministral"),
    llama_like("ministral3"),
    llama_like("nanochat"),
    llama_like("nemotron", {"norm_eps"}),
    llama_like("olmo", {"clip_qkv"}),
    llama_like("phimoe", {"router_jitter_noise", "input_jitter_noise", "lm_head_bias"}),
    llama_like("qwen2_moe", {*_QWEN_MOE, "shared_expert_intermediate_size"}),
    llama_like("seed_oss", {"attention_out_bias", "residual_dropout"}),
    llama_like("vaultgemma"),
    llama_like(
        "deepseek_v3",
        {
            *_MOE,
            "kv_lora_rank",
            "q_lora_rank",
            "qk_rope_head_dim",
            "v_head_dim",
            "qk_nope_head_dim",
            "first_k_dense_replace",
            "rope_interleave",
            "num_mtp_layers",
        },
        # latent attention: K and V of a head come out of the shared latent, together
        projections=(
            Projection("q_proj", "q", head_dim="qk_head_dim", optional=True),
            Projection("q_b_proj", "q", head_dim="qk_head_dim", optional=True),
            Projection("kv_b_proj", "q", head_dim="qk_nope_head_dim+v_head_dim"),
            Projection("o_proj", "o"),
        ),
        head_dim="v_head_dim",
        size_attributes={"num_heads": "query_heads"},
        cached_width="kv_lora_rank+qk_rope_head_dim",
        min_transformers="5.15",  # before, it cached K and V of every head
        fewer_kv_heads="all heads share one latent K and V already, and the cache holds only that",
    ),
)
