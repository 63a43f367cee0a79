"""Tiny random models and a tokenizer, built from configs.

``initializer_range=0.1`` because at the default 0.02 the softmax is nearly flat and a wrong cut
hides; head counts are no powers of two, head_dim is not hidden / heads where a family allows it,
and biases are not zero.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

WORDS = 60
SPECIAL = ["<unk>", "<pad>", "<s>", "</s>", "<mask>"]
VOCAB = WORDS + len(SPECIAL)
LAYERS = 4

CASES = ("llama-mha", "llama-gqa", "llama-mqa", "gpt2", "bert-mlm", "bert-base")


def model(case: str, dtype: torch.dtype = torch.float32, attn: str = "sdpa") -> PreTrainedModel:
    """Builds one tiny model in eval mode."""
    torch.manual_seed(sum(map(ord, case)))
    built = _build(case, attn)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return built.to(dtype).eval()


def _build(case: str, attn: str) -> PreTrainedModel:
    family, _, kind = case.partition("-")
    common = {
        "vocab_size": VOCAB,
        "initializer_range": 0.1,
        "attn_implementation": attn,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "pad_token_id": 1,
    }
    if family == "llama":
        config = LlamaConfig(
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=6,
            num_key_value_heads={"mha": 6, "gqa": 3, "mqa": 1}[kind],
            head_dim=10,
            attention_bias=True,
            max_position_embeddings=128,
            **common,
        )
        return LlamaForCausalLM(config)
    if family == "gpt2":
        sizes = {"n_embd": 60, "n_layer": LAYERS, "n_head": 6, "n_positions": 128}
        return GPT2LMHeadModel(GPT2Config(**sizes, **common))
    config = BertConfig(
        hidden_size=60,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        max_position_embeddings=128,
        **common,
    )
    heads = {
        "mlm": BertForMaskedLM,
        "base": BertModel,
        "classifier": BertForSequenceClassification,
    }
    return heads[kind](config)


def tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer over w0 ... w59."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(WORDS))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        mask_token="<mask>",
    )


def save(built: PreTrainedModel, folder: Path) -> Path:
    """Writes a model with its tokenizer."""
    built.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def text(words: int, seed: int = 0) -> str:
    """Words in which every second one depends on the one before, so that there is what to learn."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(0, WORDS, (words,), generator=generator).tolist()
    for i in range(1, words, 2):
        draws[i] = (draws[i - 1] * 7 + 3) % WORDS
    return " ".join(f"w{i}" for i in draws)
