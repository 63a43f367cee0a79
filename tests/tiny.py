"""Tiny random models and a tokenizer, built from configs.

``initializer_range=0.1`` because at the default 0.02 the softmax is nearly flat and a wrong cut
hides; head counts are no powers of two, head_dim is not hidden / heads where a family allows it,
and biases are not zero.
"""

import dataclasses
import inspect
import json

import torch
import transformers
from packaging.version import Version
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForCTC,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    PreTrainedTokenizerFast,
)

import headprune
from headprune.family import FAMILIES, vision_language
from headprune.model.batch import _TASKS

WORDS = 60
SPECIAL = ["<unk>", "<pad>", "<s>", "</s>", "<mask>"]
VOCAB = WORDS + len(SPECIAL)
LAYERS = 4

# what is tested most deeply: the three projection layouts, MHA, GQA and MQA
CASES = ("llama-mha", "llama-gqa", "llama-mqa", "gpt2", "bert-mlm", "bert-base")

# Sizes, under every name that a config class gives them; each takes those that it has.
SIZES = {
    "vocab_size": VOCAB,
    "decoder_vocab_size": VOCAB,
    "initializer_range": 0.1,
    "init_std": 0.1,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
    "max_position_embeddings": 128,
    "n_positions": 128,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size"), 48),
    "word_embed_proj_dim": 48,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "hidden_dim", "d_ff", "n_inner"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 6),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 6),
    "num_key_value_heads": 3,
    "head_dim": 10,
    "d_kv": 10,
    "attention_bias": True,
    "image_size": 12,
    "patch_size": 4,
    "depth": 2,
    "embed_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 40,
    "sliding_window": 8,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **{"num_experts_per_tok": 2, "moe_num_experts": 4, "moe_k": 2, "n_shared_experts": 1},
    "moe_intermediate_size": 32,
}
_WAVES = {
    **{"conv_dim": [16] * 3, "conv_stride": [5, 4, 4], "conv_kernel": [10, 4, 4]},
    **{"num_feat_extract_layers": 3, "num_conv_pos_embeddings": 8},
    "num_conv_pos_embedding_groups": 4,
}
# What a family needs beyond SIZES, and the variants that its row covers with other code.
DIFFERENCES = {
    "llama-mha": {"num_key_value_heads": 6},
    "llama-mqa": {"num_key_value_heads": 1},
    "qwen2_moe": {"shared_expert_intermediate_size": 32},
    "gemma3_text": {"query_pre_attn_scalar": 10, "layer_types": ["full_attention"] * LAYERS},
    "gemma2": {"query_pre_attn_scalar": 10},
    "cohere": {"use_qk_norm": True},
    "glm4_moe": {"use_qk_norm": True},
    "xglm": {"attention_heads": 6},
    "esm": {"position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": 4},
    "eurobert": {"mask_token_id": 4},
    "data2vec-vision": {"use_shared_relative_position_bias": True, "out_indices": [*range(LAYERS)]},
    "stablelm-qk_norm": {"qk_layernorm": True, "use_qkv_bias": True},
    "phi-qk_norm": {"qk_layernorm": True, "num_key_value_heads": 6, "head_dim": 8},
    "gpt2": {"n_embd": 60},
    "bart-causal": {},
    "gpt_bigcode-mha": {"multi_query": False},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "gptj": {"rotary_dim": 4},
    "mpt": {"max_seq_len": 64},
    "falcon": {"new_decoder_architecture": False, "multi_query": False},
    "falcon-mqa": {"new_decoder_architecture": False, "multi_query": True},
    "falcon-new": {"new_decoder_architecture": True, "num_kv_heads": 3},
    "falcon-alibi": {"new_decoder_architecture": False, "multi_query": False, "alibi": True},
    "t5": {"decoder_start_token_id": 2},
    "mt5": {"decoder_start_token_id": 2},
    "deepseek_v3": {
        **{"q_lora_rank": 20, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8},
        **{"v_head_dim": 10, "num_key_value_heads": 6, "head_dim": 4},
        **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 2},
    },
    "deberta-v2": {
        **{"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "share_att_key": False},
        **{"position_biased_input": False, "type_vocab_size": 0},
    },
    "deberta-v2-shared": {
        **{"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "share_att_key": True},
        "position_buckets": 8,
    },
    "modernbert": {"cls_token_id": 2, "sep_token_id": 3, "local_attention": 8},
    "whisper": {"vocab_size": VOCAB, "suppress_tokens": None, "begin_suppress_tokens": None},
    "clip": {"projection_dim": 16},
    "wav2vec2": _WAVES,
    "hubert": _WAVES,
    "data2vec-audio": {**_WAVES, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 5},
    "unispeech": _WAVES,
    "sew": _WAVES,
}
# Kinds of layers in the cache, for families whose config names them: of every layer, or of all.
_ORDERS = {
    "sliding_first": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "full_first": ["full_attention", "sliding_attention"] * (LAYERS // 2),
}
WINDOWS = {
    "sliding": {"use_sliding_window": True},
    **{name: {"use_sliding_window": True, "layer_types": o} for name, o in _ORDERS.items()},
}


def _present(case):
    """Whether the installed transformers has the family, as its row describes it."""
    since = FAMILIES[family_of_case(case)].min_transformers
    return family_of_case(case) in CONFIG_MAPPING and (
        since is None or Version(transformers.__version__) >= Version(since)
    )


def family_of_case(case):
    """The model type of a case: the longest family name that it starts with."""
    return max((n for n in FAMILIES if case == n or case.startswith(f"{n}-")), key=len)


def present(*cases):
    """Those of some cases that the installed transformers has."""
    return [case for case in cases if _present(case)]


_ALL_CASES = (*FAMILIES, *(case for case in DIFFERENCES if case not in (*FAMILIES, *CASES)))


def one_per_row(cases):
    """The first case of each row of the family table, the names of families aside, and variant.

    The code of headprune that families go through is the same where the rest of their rows is.
    """
    first = {}
    for case in cases:
        name = family_of_case(case)
        row = FAMILIES[name]
        how = [row.for_runtime(), row.native, row.native_unless, row.fewer_kv_heads]
        first.setdefault(json.dumps([case.removeprefix(name), *how]), case)
    return {*first.values()}


def one_per_layout(cases):
    """The first case of each way in which projections hold heads, and a result can be written."""
    first = {}
    for case in cases:
        row = FAMILIES[family_of_case(case)]
        held = [{**each, "path": None} for each in row.for_runtime()["projections"]]
        how = [held, bool(row.per_head), row.native, len(row.attention)]
        first.setdefault(json.dumps(how), case)
    return {*first.values()}


VISION_LANGUAGE = {row.model_type for row in vision_language.ROWS}
# three sections of rotary frequencies: time, height, width
_SECTIONS = {name: [1, 1, 2] for name in ("qwen2_vl", "qwen2_5_vl")}
_SECTIONS |= {name: [1, 2, 2] for name in ("qwen3_vl", "qwen3_vl_moe")}
ROPE = {
    name: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section}
    for name, section in _SECTIONS.items()
}
FAMILY_CASES = tuple(present(*_ALL_CASES))
_CLASSES = {
    "mlm": AutoModelForMaskedLM,
    "base": AutoModel,
    "classifier": AutoModelForSequenceClassification,
    "causal": AutoModelForCausalLM,
    "clip": AutoModel,
    "siglip": AutoModel,
    "deit": AutoModel,
}
_PREFERRED = (
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoModelForMaskedLM,
    AutoModelForCausalLM,
    AutoModelForCTC,
    AutoModelForImageTextToText,
    AutoModelForImageClassification,
    AutoModel,
)
# where configs say how many KV heads there are
_KV_HEADS = (
    *("num_key_value_heads", "num_kv_heads", "num_attention_heads", "encoder_attention_heads"),
    *("n_head", "n_heads", "num_heads"),
)


def model(case, dtype=torch.float32, attn=None, **settings):
    """Builds one tiny model in eval mode; a case is a family, or a family and a variant."""
    torch.manual_seed(sum(map(ord, case)))
    built = _build(case, attn, settings)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if name.endswith("bias") or parameter.dim() == 1:
                parameter.normal_(float(parameter.mean()), 0.1)
            elif parameter.dim() == 2 and isinstance(_owner(built, name), nn.Linear):
                parameter.normal_(std=0.1)
    return built.to(dtype).eval()


def task(case):
    """The task of a tiny model, which need not be built: which tests take part is asked of all."""
    return _TASKS.get(_auto(case, config(case)).__name__, "features")


def reads_text(case):
    """Whether a tiny model reads text alone."""
    built = config(case)
    if case in VISION_LANGUAGE or not hasattr(built, "vocab_size"):
        return False
    forward = _auto(case, built)._model_mapping[type(built)].forward
    return "input_ids" in inspect.signature(forward).parameters


def dropouts(case):
    """The settings of a family that name a probability of dropout."""
    built = config(case)
    names = [field.name for field in dataclasses.fields(built) if "drop" in field.name]
    return [name for name in names if isinstance(getattr(built, name), float)]


def kv_heads(case):
    """The KV heads of a tiny model's first attention module, by its config alone."""
    text = config(case).get_text_config(decoder=True)
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", 0):
        return 1
    kv_heads = (getattr(text, name, None) for name in _KV_HEADS)
    return next(int(count) for count in kv_heads if count)


def _owner(built, name):
    return built.get_submodule(name.rpartition(".")[0])


def config(case, **settings):
    """The config of a tiny model, with other settings if some are given."""
    name = family_of_case(case)
    cls = CONFIG_MAPPING[name]
    differences = {**DIFFERENCES.get(name, {}), **DIFFERENCES.get(case, {})}
    if name in VISION_LANGUAGE or name in ("clip", "siglip"):
        differences = {**differences, **_parts(cls)}
    windows = WINDOWS.get(case.removeprefix(f"{name}-"), {})
    differences.get("text_config", differences).update(windows)
    return cls(**{**_sizes(cls), **differences, **settings})


def _sizes(cls):
    fields = {f.name for f in dataclasses.fields(cls)} | set(cls.attribute_map)
    mapped = {cls.attribute_map.get(key, key) for key in SIZES if key in fields}
    return {key: SIZES[key] for key in mapped if key in SIZES}


def _parts(cls):
    """Tiny configs of the parts of a model of images and text."""
    default, parts = cls(), {}
    for part in ("text_config", "vision_config"):
        own = getattr(default, part)
        parts[part] = {**_sizes(type(own)), "model_type": own.model_type}
        if "rope_parameters" in (f.name for f in dataclasses.fields(own)) and part == "text_config":
            parts[part]["rope_parameters"] = ROPE.get(cls.model_type)
    return parts


def _build(case, attn, settings):
    built_config = config(case, **settings)
    how = {"attn_implementation": attn} if attn else {}
    return _auto(case, built_config).from_config(built_config, **how)


def _auto(case, built_config):
    kind = case.removeprefix(family_of_case(case)).removeprefix("-")
    return _CLASSES.get(kind or case) or next(
        auto for auto in _PREFERRED if type(built_config) in auto._model_mapping
    )


def tokenizer():
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


def untied(built):
    """The same model with an output embedding of its own, where it has one."""
    built.config.tie_word_embeddings = False
    apart = type(built)(built.config)
    apart.load_state_dict(built.state_dict())
    return apart


def healed(model, teacher, output, data, **settings):
    """Heals in a few large steps, in batches of the default size."""
    fast = {"steps": 12, "optimizer": "adamw", "learning_rate": 1e-3}
    return headprune.heal(model, output, teacher=teacher, data=data, **fast | settings)


def save(built, folder):
    """Writes a model with its tokenizer."""
    built.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def text(words, seed=0):
    """Words in which every second one depends on the one before, so that there is what to learn."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(0, WORDS, (words,), generator=generator).tolist()
    for i in range(1, words, 2):
        draws[i] = (draws[i - 1] * 7 + 3) % WORDS
    return " ".join(f"w{i}" for i in draws)
