"""Read and write tensors of safetensors files in blocks, never a whole one in memory.

Files are read with pread: a mapped file would count as memory of the process.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from headprune.errors import CheckpointError
from headprune.io.parsing import read_json, refuse_pointer
from headprune.io.streaming import bytes_of, equal_bytes, header
from headprune.tensors.dtypes import SAFETENSORS, dtype_name
from headprune.tensors.index_maps import IndexMap

# bytes; they stay in the processor's cache
BLOCK = 1 << 20
SHARD = "50GB"  # the largest file, as transformers has it


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its element type as safetensors names it ("BF16"), shape and offset."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes on disk."""
        known = SAFETENSORS.get(self.dtype)
        return self.elements * (known.itemsize if known is not None else 1)


@contextmanager
def _damage_is(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"'{file}' is damaged: {error}. Get it again.") from None


def tensors_in(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name, from its header.

    Raises:
        CheckpointError: If it is damaged.
    """
    with _damage_is(file):
        refuse_pointer(file)
    with _damage_is(file), safe_open(file, "pt"), file.open("rb") as content:  # safe_open checks it
        length = int.from_bytes(content.read(8), "little")
        entries = json.loads(content.read(length))
    entries.pop("__metadata__", None)
    return {
        name: StoredTensor(
            entry["dtype"], tuple(entry["shape"]), file, 8 + length + entry["data_offsets"][0]
        )
        for name, entry in entries.items()
    }


@dataclass(frozen=True)
class Piece:
    """A tensor of a result, and its source.

    Attributes:
        name: Its name.
        live: Name of its source in the uncut model; None if the model holds it fused with others.
        source: The uncut tensor, in a file, or in memory if it was changed.
        kept: The part of it, and its factors; None for all.
        computed: Element type of the computation.
        dtype: Element type in the written file.
    """

    name: str
    live: str | None
    source: StoredTensor | Tensor
    kept: IndexMap | None
    computed: torch.dtype
    dtype: torch.dtype

    @classmethod
    def whole(cls, name: str, source: StoredTensor) -> Piece:
        """Return a tensor of a file as it is."""
        dtype = SAFETENSORS[source.dtype]
        return cls(name, name, source, None, dtype, dtype)

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Piece:
        """Return a tensor that no file has."""
        return cls(name, None, tensor, None, tensor.dtype, tensor.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        shape = list(self.source.shape)
        if self.kept is not None:
            shape[self.kept.dim] = len(self.kept.indices)
        return tuple(shape)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Runs of neighbouring rows of the source: the first and the number of rows."""
        if self.kept is None or self.kept.dim != 0:
            return [(0, self.source.shape[0] if self.source.shape else 1)]
        rows = self.kept.indices
        ends = [*(torch.diff(rows) != 1).nonzero().flatten().add(1).tolist(), len(rows)]
        return [(int(rows[at]), end - at) for at, end in pairwise([0, *ends]) if end > at]

    @property
    def copied(self) -> bool:
        """True if it is rows of a file, unchanged."""
        if isinstance(self.source, Tensor):
            return False
        held = SAFETENSORS[self.source.dtype]
        exact = torch.promote_types(held, self.computed) is self.computed and held is self.dtype
        return exact and (self.kept is None or (self.kept.dim == 0 and self.kept.scale is None))

    def blocks(self) -> Iterator[Tensor]:
        """Yield its rows in blocks; each is overwritten by the next.

        Raises:
            CheckpointError: If they cannot be read, or overflow in the written type.
        """
        kept, done = self.kept, 0
        for block in _read(self.source, self.runs):
            part = kept
            if kept is not None and kept.dim == 0 and kept.scale is not None:
                rows = slice(done, done + len(block))
                part = replace(kept, indices=kept.indices[rows], scale=kept.scale[rows])
            done += len(block)
            yield block if self.copied else self._written(block, part)

    def read(self) -> Tensor:
        """Return all of it.

        Raises:
            CheckpointError: As for ``blocks``.
        """
        read, done = torch.empty(self.shape, dtype=self.dtype), 0
        rows = read if self.shape else read[None]
        for block in self.blocks():
            rows[done : done + len(block)] = block
            done += len(block)
        return read

    def _written(self, block: Tensor, part: IndexMap | None) -> Tensor:
        """Return rows cut, and scaled in float32 at least."""
        if part is not None and part.dim != 0:
            block = part.selected(block)
        block = block.to(self.computed)
        if part is not None and part.scale is not None:
            block = part.scaled(block.to(torch.promote_types(self.computed, torch.float32)))
        written = block.to(self.dtype)
        if written.is_floating_point() and bool(written.isinf().any()):
            lost = block[written.isinf() & block.isfinite()]
            if len(lost):  # a mask that was infinite before may stay so
                raise overflow(self.name, float(lost.abs().max()), self.dtype)
        return written


def overflow(name: str, largest: float, dtype: torch.dtype) -> CheckpointError:
    """Return the refusal of a weight that an element type cannot hold."""
    return CheckpointError(
        f"'{name}' holds {largest:.3g}, and {dtype_name(dtype)} ends at "
        f"{torch.finfo(dtype).max:,.6g}: the weight would overflow. Write another type: --config "
        "out_dtype=bfloat16 or out_dtype=float32."
    )


def _read(source: StoredTensor | Tensor, runs: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """Yield rows of a tensor, at most a block at once."""
    count = max(source.shape[0] if source.shape else 1, 1)
    width = (source.nbytes if isinstance(source, Tensor) else source.bytes) // count
    most = max(1, BLOCK // max(width, 1))
    parts = [
        (first + at, min(most, rows - at)) for first, rows in runs for at in range(0, rows, most)
    ]
    if isinstance(source, Tensor):
        held = source.detach() if source.shape else source.detach()[None]
        yield from (held[first : first + rows].cpu() for first, rows in parts)
        return
    buffer = torch.empty(most * width, dtype=torch.uint8)
    with _damage_is(source.file):
        file = source.file.open("rb")
    with file:
        for first, rows in parts:
            part = buffer[: rows * width]
            with _damage_is(source.file):
                _fill(file.fileno(), part, source.start + first * width)
            yield part.view(SAFETENSORS[source.dtype]).view(rows, *source.shape[1:])


def _fill(file: int, part: Tensor, offset: int) -> None:
    view = part.numpy().data
    while view:
        count = os.preadv(file, [view], offset)
        if not count:
            raise ValueError("it ends too early")
        view, offset = view[count:], offset + count


def bytes_between(source: StoredTensor, start: int, end: int) -> Tensor:
    """Return bytes ``start`` to ``end`` of a tensor.

    Raises:
        CheckpointError: If they cannot be read.
    """
    part = torch.empty(end - start, dtype=torch.uint8)
    with _damage_is(source.file), source.file.open("rb") as file:
        _fill(file.fileno(), part, source.start + start)
    return part


def same_bytes(one: StoredTensor, two: StoredTensor) -> bool:
    """Return whether two tensors are the same to the bit.

    Raises:
        CheckpointError: If they cannot be read.
    """
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    starts = range(0, one.bytes, BLOCK)
    parts = ((start, min(start + BLOCK, one.bytes)) for start in starts)
    return all(equal_bytes(bytes_between(one, *part), bytes_between(two, *part)) for part in parts)


def rows_of(source: StoredTensor, start: int = 0, end: int | None = None) -> Tensor:
    """Return rows of a tensor; all of them by default.

    Raises:
        CheckpointError: If they cannot be read.
    """
    dtype, shape = SAFETENSORS[source.dtype], source.shape
    if not shape or not source.elements:
        return bytes_between(source, 0, source.bytes).view(dtype).view(shape)
    end, width = min(shape[0] if end is None else end, shape[0]), source.bytes // shape[0]
    part = bytes_between(source, start * width, end * width)
    return part.view(dtype).view(end - start, *shape[1:])


def first_numbers(source: StoredTensor, count: int) -> Tensor:
    """Return the first numbers of a tensor.

    Raises:
        CheckpointError: If they cannot be read.
    """
    dtype = SAFETENSORS[source.dtype]
    return bytes_between(source, 0, min(count, source.elements) * dtype.itemsize).view(dtype)


def write_shards(
    pieces: Sequence[Piece],
    folder: Path,
    parameters: int,
    max_shard_size: str = SHARD,
    on_tensor: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write tensors as transformers does: one file, or several and an index.

    Args:
        pieces: The tensors.
        folder: The folder of the result.
        parameters: Parameters of the model, for the index.
        max_shard_size: Largest size of a file, such as "50GB".
        on_tensor: Called with tensors done and tensors in all.

    Raises:
        CheckpointError: If a source cannot be read.
        OSError: If writing fails.
    """
    if max_shard_size == SHARD and (files := _whole_files(pieces)):
        for whole in files:
            shutil.copyfile(whole, folder / whole.name)
        return
    named = {piece.name: piece for piece in pieces}
    sizes = {n: torch.empty(p.shape, dtype=p.dtype, device="meta") for n, p in named.items()}
    split = split_torch_state_dict_into_shards(
        sizes, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    done = itertools.count(1)
    for file, names in split.filename_to_tensors.items():
        shard = {name: named[name] for name in names}
        _write(folder / file, shard, lambda: on_tensor(next(done), len(pieces)))
    if split.is_sharded:
        metadata = {"total_parameters": parameters, **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")


def _whole_files(pieces: Sequence[Piece]) -> list[Path]:
    """Return the files of a checkpoint whose tensors all stay as they are; empty if some do not."""
    whole = {p.name: p.source for p in pieces if p.copied and p.kept is None}
    files = {source.file for source in whole.values() if isinstance(source, StoredTensor)}
    index = {file.with_name(SAFE_WEIGHTS_INDEX_NAME) for file in files}
    if {file.name for file in files} == {SAFE_WEIGHTS_NAME}:
        index = set()
    if len(whole) < len(pieces) or not all(file.is_file() for file in index):
        return []
    listed = {name for file in index for name in read_json(file)["weight_map"].values()}
    present = {name: tensor for file in files for name, tensor in tensors_in(file).items()}
    same = whole == present and (not index or listed == {file.name for file in files})
    return [*files, *index] if same else []


def _write(file: Path, pieces: Mapping[str, Piece], on_tensor: Callable[[], None]) -> None:
    text, order = header({name: (piece.dtype, piece.shape) for name, piece in pieces.items()})
    with file.open("wb", buffering=0) as out:
        _write_all(out.fileno(), memoryview(text))
        for name in order:
            for block in pieces[name].blocks():
                _write_all(out.fileno(), bytes_of(block).numpy().data)
            on_tensor()


def _write_all(file: int, view: memoryview) -> None:
    while view:
        view = view[os.write(file, view) :]
