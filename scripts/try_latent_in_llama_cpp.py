"""A result of convert-mla in llama.cpp: the same logits, and the size of its cache.

    python scripts/try_latent_in_llama_cpp.py FOLDER ORIGINAL.gguf OUT.gguf

The file is of architecture deepseek2 in float32; the tokenizer is taken from a GGUF file of the
original. Needs gguf and xllamacpp.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
import typer
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM

import llama_cpp_graph

TOKENS = 512
SMALL = 1e-7  # of the norm of queries, which llama.cpp wants and eps makes linear


def main(folder: Path, like: Path, out: Path) -> None:
    """Write the file, and print differences and the cache."""
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    kind = net.config.rope_parameters["rope_type"]
    if net.config.attention_bias or kind != "default":
        raise typer.BadParameter("Only a model without biases, with plain rotary embeddings, fits.")
    written(net, like, out)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, net.config.vocab_size, (1, TOKENS), generator=generator)
    with torch.no_grad():
        wanted = net(ids).logits[0]
    got = llama_cpp_graph.load(out).run({"input_ids": ids})["logits"].view(wanted.shape)
    gap = float((wanted - got).abs().max() / wanted.abs().max())
    cache = llama_cpp_graph.times(out, ids, 16).cache_bytes_per_token
    same = int((wanted.argmax(-1) == got.argmax(-1)).sum())
    console = Console(highlight=False)
    console.print(
        f"logits {gap:.1e} apart, relative to the largest; {same} of {TOKENS} tokens the same; "
        f"{cache:,.0f} bytes of cache per token in float16"
    )


def written(net: Any, like: Path, out: Path) -> None:
    """Write a DeepseekV3ForCausalLM without biases as a GGUF file."""
    config, writer = net.config, gguf.GGUFWriter(out, "deepseek2")
    for field in gguf.GGUFReader(like).fields.values():
        if field.name.startswith("tokenizer."):
            value, kind = field.contents(), field.types[0]
            add = writer.add_array if kind == gguf.GGUFValueType.ARRAY else None
            add(field.name, value) if add else writer.add_key_value(field.name, value, kind)
    layers, rank, rotary = config.num_hidden_layers, config.kv_lora_rank, config.qk_rope_head_dim
    writer.add_block_count(layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_vocab_size(config.vocab_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1)  # the latent
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(rotary)
    writer.add_q_lora_rank(config.hidden_size)
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rotary)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config.qk_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_leading_dense_block_count(layers)  # no experts
    for add in (writer.add_expert_count, writer.add_expert_used_count):
        add(1)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_weights_scale(1.0)
    for name, tensor in tensors(net).items():
        writer.add_tensor(name, tensor.detach().float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(net: Any) -> dict[str, Tensor]:
    """Return the tensors by llama.cpp's names."""
    config, weights = net.config, net.state_dict()
    named = {
        "token_embd": weights["model.embed_tokens.weight"],
        "output_norm": weights["model.norm.weight"],
        "output": weights["lm_head.weight"],
    }
    same = {
        "attn_norm": "input_layernorm",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_q_b": "self_attn.q_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    }
    hidden = config.hidden_size
    for layer in range(config.num_hidden_layers):
        of, block = f"model.layers.{layer}.", f"blk.{layer}."
        named |= {block + name: weights[f"{of}{theirs}.weight"] for name, theirs in same.items()}
        up = weights[f"{of}self_attn.kv_b_proj.weight"]
        up = up.unflatten(0, (config.num_attention_heads, -1))
        named[block + "attn_k_b"] = up[:, : config.qk_nope_head_dim].transpose(1, 2)
        named[block + "attn_v_b"] = up[:, config.qk_nope_head_dim :]
        named[block + "attn_q_a"] = SMALL * torch.eye(hidden)
        named[block + "attn_q_a_norm"] = torch.full((hidden,), config.rms_norm_eps**0.5 / SMALL)
    return {f"{name}.weight": tensor for name, tensor in named.items()}


if __name__ == "__main__":
    typer.run(main)
