"""A model file of Marian as browsers have it (int8), read into MarianMTModel.

    u64 version, u64 n
    n x u64: length of the name, type, dimensions, bytes
    n names, each with a 0 behind it
    shapes, i32
    u64 p, p bytes of padding
    n tensors, one behind the other

Type 0x404 is float32. 0x4101 is int8, with a float32 m behind the numbers: a weight is q / m.
Matrices of int8 lie as ``nn.Linear`` has them, (out, in), whatever their shape says; only the
embeddings lie as theirs. The padding token, which Marian has none of, is one more: its embedding is
zero, as what Marian's decoder starts from, and it is never predicted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from ssru import ssru_decoders
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import MarianConfig, MarianMTModel, PreTrainedTokenizerFast

FLOAT32, INT8 = 0x404, 0x4101
SETTINGS = "special:model.yml"
NEVER = -1e9  # the logit of the padding token
END, UNKNOWN, PADDING = "</s>", "<unk>", "<pad>"

# what a layer's modules are called there, by their names here
_ATTENTION = {
    **{f"{p}_proj": (f"W{p}", f"b{p}") for p in "qkv"},
    "out_proj": ("Wo", "bo"),
}
_FFN = {"fc1": ("W1", "b1"), "fc2": ("W2", "b2")}


class MarianFileError(Exception):
    """What lies in a file is not what is read here."""


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file, in float32, and the settings that the model was trained with.

    Raises:
        MarianFileError: If it is no such file, is cut off, or has tensors of another type.
    """
    raw, at = path.read_bytes(), 0

    def take(dtype: str, count: int) -> NDArray[Any]:
        nonlocal at
        size = np.dtype(dtype).itemsize * count
        if at + size > len(raw):
            raise MarianFileError(f"'{path}' is no model of Marian, or is cut off.")
        at += size
        return np.frombuffer(raw, dtype, count, at - size)

    version, count = take("<u8", 2).tolist()
    if version != 1:
        raise MarianFileError(f"'{path}' is in version {version} of Marian's format, not in 1.")
    heads = take("<u8", 4 * count).reshape(-1, 4).tolist()
    names = [take("u1", length).tobytes()[:-1].decode() for length, *_ in heads]
    shapes = [take("<i4", dimensions).tolist() for _, _, dimensions, _ in heads]
    take("u1", int(take("<u8", 1)[0]))
    tensors, settings = dict[str, Tensor](), dict[str, Any]()
    for name, shape, (_, kind, _, size) in zip(names, shapes, heads, strict=True):
        blob = take("u1", size).tobytes()
        if name == SETTINGS:
            settings = yaml.safe_load(blob.rstrip(b"\0"))
        elif not name.endswith("_QuantMultA"):  # scales of activations, which stay floats here
            tensors[name] = torch.from_numpy(_floats(name, kind, shape, blob))
    return tensors, settings


def _floats(name: str, kind: int, shape: list[int], blob: bytes) -> NDArray[np.float32]:
    numbers = int(np.prod(shape))
    if kind == FLOAT32 and shape[0] == 1:
        return np.frombuffer(blob, "<f4", numbers).copy()
    if kind == INT8:
        quantised = np.frombuffer(blob, np.int8, numbers).astype(np.float32)
        lying = shape if name == "Wemb" else shape[::-1]
        return quantised.reshape(lying) / np.frombuffer(blob, "<f4", 1, numbers)
    raise MarianFileError(
        f"'{name}' has shape {shape} and type {kind:#x}; matrices of int8 ({INT8:#x}) and vectors "
        f"of float32 ({FLOAT32:#x}) are read."
    )


def model_of(path: Path) -> MarianMTModel:
    """The model in a file.

    Raises:
        MarianFileError: If it cannot be read, or is laid out otherwise.
    """
    tensors, settings = read(path)
    wanted = {"dec-cell": "ssru", "transformer-postprocess": "dan", "tied-embeddings-all": True}
    for name, value in wanted.items():
        if settings.get(name) != value:
            raise MarianFileError(f"{name} is {settings.get(name)} in '{path}', not {value}.")
    vocabulary, width = tensors["Wemb"].shape
    config = MarianConfig(
        vocab_size=vocabulary + 1,
        decoder_vocab_size=vocabulary + 1,
        d_model=width,
        encoder_layers=settings["enc-depth"],
        decoder_layers=settings["dec-depth"],
        encoder_attention_heads=settings["transformer-heads"],
        decoder_attention_heads=settings["transformer-heads"],
        encoder_ffn_dim=settings["transformer-dim-ffn"],
        decoder_ffn_dim=settings["transformer-dim-ffn"],
        activation_function=settings["transformer-ffn-activation"],
        scale_embedding=True,
        dropout=0.0,  # students are trained without; with 0.1 the loss is that of noise
        max_position_embeddings=512,
        pad_token_id=vocabulary,
        decoder_start_token_id=vocabulary,
        eos_token_id=0,
        bos_token_id=None,
        forced_eos_token_id=None,
    )
    with ssru_decoders():
        model = MarianMTModel(config)
    state = {
        "model.shared.weight": torch.cat([tensors.pop("Wemb"), torch.zeros(1, width)]),
        "final_logits_bias": torch.cat(
            [tensors.pop("decoder_ff_logit_out_b"), torch.tensor([NEVER])]
        )[None],
    }
    for stack, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        for layer in range(layers):
            names = _layer_names(stack, f"{stack}_l{layer + 1}_")
            here = f"model.{stack}.layers.{layer}."
            state |= {here + ours: tensors.pop(theirs) for ours, theirs in names.items()}
    if tensors:
        raise MarianFileError(f"'{path}' has a tensor that is not placed: '{min(tensors)}'.")
    loaded = model.load_state_dict(state, strict=False)
    tied = set(model.all_tied_weights_keys)
    missing = [n for n in loaded.missing_keys if n not in tied and "embed_positions" not in n]
    if missing or loaded.unexpected_keys:
        raise MarianFileError(f"'{path}' gives no '{(missing + loaded.unexpected_keys)[0]}'.")
    return model.eval()


def _layer_names(stack: str, start: str) -> dict[str, str]:
    """Names of a layer's tensors in the file, by their names in the model's layer."""
    named = _linears(_FFN, "", f"{start}ffn_") | _norm("final_layer_norm", f"{start}ffn_ffn_ln")
    if stack == "encoder":
        named |= _linears(_ATTENTION, "self_attn.", f"{start}self_")
        return named | _norm("self_attn_layer_norm", f"{start}self_Wo_ln")
    named |= _linears(_ATTENTION, "encoder_attn.", f"{start}context_")
    named |= _norm("encoder_attn_layer_norm", f"{start}context_Wo_ln")
    named |= _linears({"forget": ("Wf", "bf")}, "ssru.", f"{start}rnn_")
    named |= {"ssru.candidate.weight": f"{start}rnn_W"}
    return named | _norm("self_attn_layer_norm", f"{start}rnn_ffn_ln")


def _linears(table: dict[str, tuple[str, str]], ours: str, theirs: str) -> dict[str, str]:
    named = {}
    for module, (weight, bias) in table.items():
        named[f"{ours}{module}.weight"] = theirs + weight
        named[f"{ours}{module}.bias"] = theirs + bias
    return named


def _norm(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.weight": f"{theirs}_scale", f"{ours}.bias": f"{theirs}_bias"}


def tokenizer_of(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in a tokenizer.json, which puts the end of a sentence behind it."""
    backend = Tokenizer.from_file(str(path))
    end = backend.token_to_id(END)
    backend.post_processor = TemplateProcessing(single=f"$A {END}", special_tokens=[(END, end)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        unk_token=UNKNOWN,
        pad_token=PADDING,
        model_max_length=512,
    )
