"""A GGUF file, written and read back piece by piece: memory does not follow its size.

``GGUFWriter.write_tensor_data`` takes a whole tensor at once, so the data is written here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from jaxtyping import Float, Shaped
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headprune.config import ExportDtype
from headprune.errors import CheckpointError, PlanError, ProofError
from headprune.formats.checkpoint import OnStep
from headprune.formats.format import ExportProof
from headprune.formats.gguf_tokenizer import add_tokenizer
from headprune.formats.source import ExportSource
from headprune.model.stored import commonest_dtype, stored_tensors
from headprune.planning.targets import WINDOWED_ARCH, rope, windowed_layers

_TYPES = {
    "float32": Type.F32,
    "float16": Type.F16,
    "bfloat16": Type.BF16,
    "q8_0": Type.Q8_0,
}
# faster than gguf.quantize, and the same numbers
_TORCH = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
_ROPE_FACTORS = "rope_freqs.weight"
# architectures whose rotary embedding turns neighbouring numbers, and not the halves of a head
_TURNS_NEIGHBOURS = {"llama", "deci", "smollm3", WINDOWED_ARCH}
_STACKS_QKV = {"openelm"}
# another architecture with the same names of tensors, until gguf knows it (0.19 does not)
_NAMED_LIKE = {WINDOWED_ARCH: "mimo2"}

Part = tuple[str, int]
"""A tensor of the model, and the number of heads by which its rows are reordered; 0 for none."""


def type_of(source: ExportSource, dtype: ExportDtype) -> Type:
    """Return the element type of the matrices in the file."""
    name = dtype.value
    if dtype is ExportDtype.AUTO:
        name = str(commonest_dtype(stored_tensors(source.folder))).removeprefix("torch.")
    return _TYPES.get(name, Type.F32)


def as_stored(numbers: Tensor, shape: tuple[int, ...], wanted: Type) -> Tensor:
    """Round numbers as a file stores a tensor of a shape; states as the kernels of its type do."""
    return _rounded(numbers, _stored_type(shape, wanted)).float()


def _rounded(numbers: Tensor, kind: Type) -> Tensor:
    if kind in _TORCH:
        return numbers.to(_TORCH[kind])
    raw = gguf.quantize(numbers.float().numpy(), kind)
    return torch.from_numpy(gguf.dequantize(raw, kind)).view(numbers.shape)


def write(
    source: ExportSource, arch: str, path: Path, wanted: Type, like: Path | None, on_step: OnStep
) -> None:
    """Write a prepared model with matrices of an element type, and the tokenizer of ``like``."""
    writer = gguf.GGUFWriter(path, arch)
    file_type = "ALL_F32" if wanted is Type.F32 else f"MOSTLY_{wanted.name}"
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_keys(writer, source)
    if arch == WINDOWED_ARCH:
        _add_windows(writer, source)
    add_tokenizer(writer, source, like)
    tensors, factors = _tensors(source, arch), rope_factors(source)
    if factors is not None:
        writer.add_tensor_info(_ROPE_FACTORS, factors.shape, np.dtype("f4"), factors.nbytes)
    total = 0
    for name, parts in tensors.items():
        shape = _shape(source, parts)
        kind = _stored_type(shape, wanted)
        size = _bytes(int(np.prod(shape)), kind)
        writer.add_tensor_info(name, shape, np.dtype("f4"), size, raw_dtype=kind)
        total += size
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    done = 0
    with path.open("ab") as file:

        def pad() -> None:
            file.write(bytes(-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))

        pad()
        if factors is not None:
            file.write(factors.float().numpy().tobytes())
            pad()
        for name, parts in tensors.items():
            kind = _stored_type(_shape(source, parts), wanted)
            for heads, piece in _pieces(source, parts):
                content = _encoded(neighbouring(piece, heads) if heads else piece, kind, name)
                done += file.write(content)
                on_step(done, total)
            pad()


def read_back(source: ExportSource, arch: str, path: Path, wanted: Type) -> ExportProof:
    """Compare every number in a file with the prepared model, rounded to the type of the file."""
    reader, expected = gguf.GGUFReader(path), _tensors(source, arch)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    if stored.keys() - {_ROPE_FACTORS} != expected.keys():
        raise ProofError("The file holds other tensors than the model.")
    _refuse_lost_head(source, stored.keys())
    gaps, count = [0.0], 0
    for name, parts in expected.items():
        tensor, shape = stored[name], _shape(source, parts)
        if tuple(tensor.shape[::-1]) != shape:
            raise ProofError(f"'{name}' has the shape {tuple(tensor.shape[::-1])}, not {shape}.")
        offset = int(tensor.data_offset)
        for heads, piece in _pieces(source, parts):
            size = _bytes(piece.numel(), tensor.tensor_type)
            raw = np.fromfile(path, np.uint8, size, offset=offset)
            offset, count = offset + size, count + piece.numel()
            numbers = _decoded(raw, tensor.tensor_type, piece.shape)
            numbers = by_halves(numbers, heads) if heads else numbers
            rounded = _rounded(piece, _stored_type(shape, wanted))
            if not torch.equal(numbers, rounded):
                gaps.append(float((numbers.float() - rounded.float()).abs().max()))
    return ExportProof(
        how="read back",
        engine=f"gguf {metadata.version('gguf')}",
        compared=f"{count:,} weights of {len(expected)} tensors",
        difference=float(torch.tensor(gaps, dtype=torch.float64).max()),  # NaN, if one is
        tolerance=0.0,
    )


def _refuse_lost_head(source: ExportSource, stored: Collection[str]) -> None:
    """Refuse a file without the output embedding of a model that has one of its own."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if "output.weight" in stored or head not in source.weights:
        return
    pairs = zip(source.weights[head].blocks(), source.weights[embedding].blocks(), strict=True)
    if not all(torch.equal(*pair) for pair in pairs):
        raise ProofError("The file lacks the output embedding, and the model has its own.")


def _tensors(source: ExportSource, arch: str) -> dict[str, list[Part]]:
    """Return the parts of every tensor of the file, stacked by rows."""
    named = gguf.MODEL_ARCH[_NAMED_LIKE.get(arch, arch).upper()]
    names = gguf.get_tensor_name_map(named, len(source.attentions))
    tensors: dict[str, list[Part]] = {}
    for name in source.weights:
        heads, known_as = 0, f"{name}.weight" if name.endswith(".sinks") else name
        if name == "lm_head.weight" and source.config.tie_word_embeddings:
            continue
        if of_layer := re.match(r"model\.layers\.(\d+)\.(?:input_layernorm|self_attn)\.", name):
            attention = source.attentions[int(of_layer[1])]
            if not attention.query_heads:
                continue
            counts = {"q": attention.query_heads, "k": attention.kv_heads, "v": 0}
            if (role := re.search(r"\.([qkv])_proj\.", name)) and arch in _TURNS_NEIGHBOURS:
                heads = counts[role[1]]
            if role and arch in _STACKS_QKV:
                known_as = name.replace(role[0], ".qkv_proj.")
        known = names.get_name(known_as, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise PlanError(f"llama.cpp's {arch} has no tensor for '{name}'. Give another --to.")
        tensors.setdefault(known, []).append((name, heads))
    return tensors


def _shape(source: ExportSource, parts: list[Part]) -> tuple[int, ...]:
    shapes = [source.weights[name].shape for name, _ in parts]
    return sum(shape[0] for shape in shapes), *shapes[0][1:]


def _pieces(source: ExportSource, parts: list[Part]) -> Iterator[tuple[int, Tensor]]:
    """Yield the rows of a tensor, some at a time; as a whole where they are reordered by heads."""
    for name, heads in parts:
        piece = source.weights[name]
        pieces = [piece.read()] if heads else piece.blocks()
        yield from ((heads, piece) for piece in pieces)


def neighbouring(rows: Shaped[Tensor, " rows *_"], heads: int) -> Shaped[Tensor, " rows *_"]:
    """Order rows of q or k so that the two numbers of each rotation are neighbours."""
    by_half: Tensor = rows.unflatten(0, (heads, 2, -1))
    return by_half.transpose(1, 2).reshape(rows.shape)


def by_halves(rows: Shaped[Tensor, " rows *_"], heads: int) -> Shaped[Tensor, " rows *_"]:
    """Invert ``neighbouring``."""
    by_pair: Tensor = rows.unflatten(0, (heads, -1, 2))
    return by_pair.transpose(1, 2).reshape(rows.shape)


def _stored_type(shape: tuple[int, ...], wanted: Type) -> Type:
    """Return float32 for vectors, and float16 for rows that no blocks fill, as llama.cpp does."""
    if len(shape) < 2:
        return Type.F32
    return Type.F16 if shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] else wanted


def _bytes(elements: int, kind: Type) -> int:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return int(elements // block * size)


def _encoded(piece: Tensor, kind: Type, name: str) -> bytes | memoryview:
    if kind not in _TORCH:
        return bytes(gguf.quantize(piece.float().numpy(), kind).tobytes())
    cast = piece.to(_TORCH[kind]).contiguous()
    if kind is Type.F16 and not cast.isfinite().all() and piece.isfinite().all():
        raise CheckpointError(
            f"'{name}' holds {float(piece.abs().max()):.3g}, and float16 ends at 65,504: it "
            "would overflow. Give --out-dtype bfloat16 or float32."
        )
    return cast.reshape(-1).view(torch.uint8).numpy().data


def _decoded(raw: np.ndarray[Any, np.dtype[np.uint8]], kind: Type, shape: torch.Size) -> Tensor:
    if kind in _TORCH:
        return torch.from_numpy(raw).view(_TORCH[kind]).view(shape)
    return torch.from_numpy(gguf.dequantize(raw, kind)).view(shape)


def _add_keys(writer: gguf.GGUFWriter, source: ExportSource) -> None:
    config, head_dim, turned = source.config, source.attentions[0].head_dim, rope(source.config)
    queries = [attention.query_heads for attention in source.attentions]
    kv_heads = [attention.kv_heads for attention in source.attentions]
    writer.add_block_count(len(queries))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_vocab_size(source.shapes["model.embed_tokens.weight"][0])
    writer.add_head_count(queries if len(set(queries)) > 1 else queries[0])
    writer.add_head_count_kv(kv_heads if len(set(kv_heads)) > 1 else kv_heads[0])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(float(config.rms_norm_eps))
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(turned["rope_theta"]))
    if turned["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(turned["factor"]))


def _add_windows(writer: gguf.GGUFWriter, source: ExportSource) -> None:
    writer.add_sliding_window(source.config.sliding_window)
    writer.add_sliding_window_pattern(windowed_layers(source.config))
    usual = source.attentions[0].head_dim ** -0.5
    writer.add_attention_scale(getattr(source.config, "attention_multiplier", usual))
    writer.add_logit_scale(1.0)


def rope_factors(source: ExportSource) -> Float[Tensor, " pairs"] | None:
    """Return the divisor of every frequency in Llama 3's scaling; None without such a scaling."""
    turned = rope(source.config)
    if turned["rope_type"] != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](source.config, torch.device("cpu"))
    head_dim = source.attentions[0].head_dim
    plain = float(turned["rope_theta"]) ** -(torch.arange(0, head_dim, 2) / head_dim)
    divisors: Tensor = plain / scaled
    return divisors
