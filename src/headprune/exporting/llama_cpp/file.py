"""A GGUF file: written and read back piece by piece, so that memory does not follow its size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from headprune.config import ExportDtype
from headprune.errors import CheckpointError, ProofError
from headprune.exporting.llama_cpp.layout import (
    ROPE_FACTORS,
    FileTensor,
    arch_of,
    by_halves,
    keys,
    neighbouring,
    rope_factors,
    tensors,
)
from headprune.exporting.source import ExportSource
from headprune.model.stored import commonest_dtype, stored_tensors
from headprune.schemas.exports import ExportProof

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_TYPES = {
    ExportDtype.FLOAT32: Type.F32,
    ExportDtype.FLOAT16: Type.F16,
    ExportDtype.BFLOAT16: Type.BF16,
    ExportDtype.Q8_0: Type.Q8_0,
}
_TORCH = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
_FILE_TYPES = {
    Type.F32: gguf.LlamaFileType.ALL_F32,
    Type.F16: gguf.LlamaFileType.MOSTLY_F16,
    Type.BF16: gguf.LlamaFileType.MOSTLY_BF16,
    Type.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
}
# of the largest number of its block: half a step of 1/127, and the rounding of the scale to float16
_Q8_STEP = 0.5 / 127 + 2**-10
# of a number, where the scale is so small that float16 has it in steps of 2**-24 (subnormal):
# half a step, 127 times; a block of nothing larger may as well be zeros
_Q8_SMALL, _Q8_LEAST = 127 * 2**-14, 127 * 2**-25


def type_of(source: ExportSource, dtype: ExportDtype) -> Type:
    """The element type of the matrices in the file."""
    if dtype is not ExportDtype.AUTO:
        return _TYPES[dtype]
    held = commonest_dtype(stored_tensors(source.folder))
    return next((kind for kind, torch_type in _TORCH.items() if torch_type is held), Type.F32)


def _type_in_file(shape: tuple[int, ...], wanted: Type) -> Type:
    """Vectors stay in float32, and rows that no blocks fill in float16, as llama.cpp has it."""
    if len(shape) < 2:
        return Type.F32
    return Type.F16 if shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] else wanted


def as_held(numbers: Tensor, shape: tuple[int, ...], wanted: Type) -> Tensor:
    """Numbers rounded as the file holds a tensor of a shape, or as kernels round what meets it.

    Args:
        numbers: The tensor itself, or states as wide as its rows.
        shape: The shape of the tensor.
        wanted: Element type of the matrices in the file.
    """
    kind = _type_in_file(shape, wanted)
    if kind is Type.F32 or not numbers.numel():
        return numbers.float()
    raw = np.frombuffer(_encoded(numbers, kind, "a hidden state"), np.uint8)
    return _decoded(raw.copy(), kind, numbers.shape).float()


def _bytes(elements: int, kind: Type) -> int:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return int(elements // block * size)


def write(
    source: ExportSource,
    path: Path,
    wanted: Type,
    vocabulary: Mapping[str, Any],
    on_step: Callable[..., None],
) -> None:
    """Writes a file.

    Args:
        source: The model, prepared.
        path: The file.
        wanted: Element type of the matrices.
        vocabulary: The tokenizer's fields.
        on_step: Called with bytes written, and bytes in all.
    """
    arch = arch_of(source)
    writer = gguf.GGUFWriter(path, arch.name)
    writer.add_file_type(_FILE_TYPES[wanted])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in keys(source, arch).items():
        _add(writer, f"{arch.name}.{key}", value)
    if "rope.scaling.factor" in keys(source, arch):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    for key, value in vocabulary.items():
        _add(writer, key, value)
    found, factors = tensors(source, arch), rope_factors(source)
    if factors is not None:
        writer.add_tensor_info(ROPE_FACTORS, factors.shape, np.dtype("f4"), 4 * len(factors))
    for tensor in found:
        kind = _type_in_file(tensor.shape, wanted)
        size = _bytes(int(np.prod(tensor.shape)), kind)
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype("f4"), size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    total = sum(_bytes(int(np.prod(t.shape)), _type_in_file(t.shape, wanted)) for t in found)
    done = 0
    with path.open("ab") as file:
        if factors is not None:
            _pad(file)
            file.write(factors.float().numpy().tobytes())
        for tensor in found:
            _pad(file)
            kind = _type_in_file(tensor.shape, wanted)
            for _, piece in _pieces(source, tensor):
                content = _encoded(piece, kind, tensor.name)
                file.write(content)
                done += len(content)
                on_step(done, total)
        _pad(file)


def _pad(file: Any) -> None:
    file.write(bytes(-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _pieces(source: ExportSource, tensor: FileTensor) -> Iterator[tuple[int, Tensor]]:
    """The rows of a tensor in the file, each with how many heads they were ordered as."""
    for part in tensor.parts:
        if part.heads:
            yield part.heads, neighbouring(source.weights[part.source], part.heads)
        else:
            yield from ((0, piece) for piece in source.weights.pieces(part.source))


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


def read_back(source: ExportSource, path: Path, wanted: Type) -> ExportProof:
    """Compares a file with a prepared model: keys, and every number of every tensor."""
    arch, reader = arch_of(source), gguf.GGUFReader(path)
    _check_keys(reader, arch.name, keys(source, arch))
    stored, gaps, count = {t.name: t for t in reader.tensors}, [0.0], 0
    expected = tensors(source, arch)
    for tensor in expected:
        found = stored.pop(tensor.name)
        if tuple(found.shape[::-1]) != tensor.shape:
            raise CheckpointError(f"'{tensor.name}' has the shape {tuple(found.shape[::-1])}.")
        offset = int(found.data_offset)
        for part in tensor.parts:
            whole = [source.weights[part.source]] if part.heads else None
            for piece in whole or source.weights.pieces(part.source):
                size = _bytes(piece.numel(), found.tensor_type)
                raw = np.fromfile(path, np.uint8, size, offset=offset)
                offset, count = offset + size, count + piece.numel()
                read = _decoded(raw, found.tensor_type, piece.shape)
                if part.heads:
                    read = by_halves(read, part.heads)
                gaps.append(_gap(read, piece, found.tensor_type))
    left = set(stored) - {ROPE_FACTORS}
    if left:
        raise ProofError(f"The file holds '{min(left)}', which the model has not.")
    exact = wanted is not Type.Q8_0
    return ExportProof(
        how="read back",
        engine=f"gguf {metadata.version('gguf')}",
        compared=f"{count:,} weights of {len(expected)} tensors"
        + ("" if exact else ", relative to the largest of their block"),
        difference=float(torch.tensor(gaps, dtype=torch.float64).max()),  # NaN, if one is
        tolerance=0.0 if exact else _Q8_STEP,
    )


def _decoded(raw: Bytes, kind: Type, shape: torch.Size) -> Tensor:
    if kind in _TORCH:
        return torch.from_numpy(raw).view(_TORCH[kind]).view(shape)
    return torch.from_numpy(gguf.dequantize(raw, kind)).view(shape)


def _gap(read: Tensor, piece: Tensor, kind: Type) -> float:
    if kind in _TORCH:
        same = torch.equal(read, piece.to(_TORCH[kind]))
        return 0.0 if same else float((read.double() - piece.double()).abs().nan_to_num(1).max())
    blocks = piece.float().unflatten(-1, (-1, 32))
    off = (read.unflatten(-1, (-1, 32)) - blocks).abs().amax(-1)
    largest = blocks.abs().amax(-1)
    off = torch.where(largest < _Q8_SMALL, (off - _Q8_LEAST).clamp(min=0), off)
    return float((off / largest.clamp(min=1e-30)).max())


def _check_keys(reader: gguf.GGUFReader, arch: str, wanted: Mapping[str, Any]) -> None:
    for key, value in {"general.architecture": arch}.items() | {
        (f"{arch}.{key}", tuple(value) if isinstance(value, list) else value)
        for key, value in wanted.items()
    }:
        found = reader.get_field(key)
        content = None if found is None else found.contents()
        content = tuple(content) if isinstance(content, list) else content
        same = content == (float(np.float32(value)) if isinstance(value, float) else value)
        if not same:
            raise CheckpointError(f"The file says {key}={content}, and the model {value}.")
