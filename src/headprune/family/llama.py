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


def llama_like(model_type: str, **differences: Any) -> Family:
    """Return Llama's row with some fields replaced.

    Args:
        model_type: ``config.model_type`` of the family.
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
    return Family(model_type=model_type, **{**llama, **differences})


_BIDIRECTIONAL = {"use_bidirectional_attention": "attention in both directions is untested"}
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

# laid out as Llama in all
_PLAIN = (
    "llama mistral mixtral qwen2 qwen3 qwen3_moe gemma smollm3 granite starcoder2 apertus arcee",
    "cohere2 ernie4_5 ernie4_5_moe exaone4 glm glm4 glm4_moe granitemoe hunyuan_v1_dense",
    "hunyuan_v1_moe jais2 ministral ministral3 nanochat nemotron olmo phimoe qwen2_moe seed_oss",
    "vaultgemma",
)

ROWS = (
    *(llama_like(name) for line in _PLAIN for name in line.split()),
    llama_like("gemma2", refused=_BIDIRECTIONAL),
    llama_like("gemma3_text", refused=_BIDIRECTIONAL),
    llama_like("gpt_oss", per_head={"sinks": "q"}),
    llama_like("cohere", per_head={"q_norm.weight": "q", "k_norm.weight": "k"}),
    llama_like("olmo2", **_FULL_WIDTH_NORMS),
    llama_like("olmo3", **_FULL_WIDTH_NORMS),
    llama_like("olmoe", **_FULL_WIDTH_NORMS),
    llama_like(
        "stablelm",
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
        projections=(*QKVO[:3], Projection("dense", "o")),
        native_unless=("qk_layernorm",),  # its norms are hidden_size / num_attention_heads wide
    ),
    llama_like(
        "phi3",
        projections=(Projection("qkv_proj", "qkv"), Projection("o_proj", "o")),
        size_attributes={
            "num_key_value_heads": "kv_heads",
            "num_key_value_groups": "queries_per_kv",
        },
        config_size_attributes={"num_attention_heads": "query_heads"},
    ),
    llama_like(
        "deepseek_v3",
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
