"""Rows on disk, of which only what is looked at is in memory."""

from __future__ import annotations

import ctypes
import mmap
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, List
from numpy.typing import NDArray

from headprune.errors import DataError

AT_ONCE = 1000  # rows
_PAGEOUT = 21  # MADV_PAGEOUT of Linux 5.4: takes pages out of memory, changes nothing in them


def evenly(total: int, count: int) -> list[int]:
    """So many of the numbers from 0 to below ``total``, evenly, the first among them."""
    return [i * total // count for i in range(count)]


def apart(total: int, count: int) -> tuple[list[int], list[int]]:
    """Split the numbers from 0 to below ``total`` in two, the second ``count`` of them, evenly."""
    taken = [(2 * i + 1) * total // (2 * count) for i in range(count)]
    return sorted(set(range(total)) - set(taken)), taken


def stored(parts: Iterable[Mapping[str, Any]]) -> Dataset:
    """Writes rows to a temporary file as they come, and reads them from there.

    The file is mapped into memory and has no name any more when this returns, so that nothing is
    left of it however the process ends from then on.

    Args:
        parts: Some rows each, as columns: numbers, lists of numbers, or an array of shape
            (rows, length).

    Raises:
        DataError: If the disk is full.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="headprune-") as folder:
            path = Path(folder) / "rows.arrow"
            if not _written(parts, path):
                return Dataset.from_dict({"input_ids": [], "attention_mask": []})
            return Dataset.from_file(str(path))
    except OSError as error:
        raise DataError(
            f"The tokens could not be kept in '{tempfile.gettempdir()}' ({error}). Make room "
            "there, or name another folder in the variable TMPDIR."
        ) from None


def let_go(rows: Dataset) -> None:
    """Takes out of memory what was read of rows that lie in a mapped file.

    The system does so by itself where memory is short, but until then it counts as ours. Where
    there is no such call, nothing is done.
    """
    if sys.platform != "linux" or not rows.cache_files:
        return
    libc = ctypes.CDLL(None)
    buffers = (b for column in rows.data.columns for part in column.chunks for b in part.buffers())
    for buffer in filter(None, buffers):
        start = buffer.address // mmap.PAGESIZE * mmap.PAGESIZE
        length = ctypes.c_size_t(buffer.address + buffer.size - start)
        libc.madvise(ctypes.c_void_p(start), length, _PAGEOUT)


def lengths(rows: Dataset, column: str = "input_ids") -> NDArray[np.int64]:
    """Tokens of every row."""
    batches = rows.select_columns([column]).with_format("arrow").iter(AT_ONCE)
    counted = [pc.list_value_length(batch.column(0)).to_numpy() for batch in batches]
    return np.concatenate([np.empty(0), *counted]).astype(np.int64)


def widths(rows: Dataset) -> NDArray[np.int64]:
    """Tokens of the longer side of every row, where it has a source and a target."""
    sides = [name for name, kind in rows.features.items() if isinstance(kind, List)]
    longer: NDArray[np.int64] = np.stack([lengths(rows, name) for name in sides]).max(axis=0)
    return longer


def _written(parts: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Writes the rows; returns how many parts there were."""
    count, writer = 0, None
    with pa.OSFile(str(path), "wb") as file:
        try:
            for part in parts:
                batch = pa.RecordBatch.from_pydict({n: _column(v) for n, v in part.items()})
                writer = writer or pa.ipc.new_stream(file, batch.schema)
                writer.write_batch(batch)
                count += 1
        finally:
            if writer is not None:
                writer.close()
    return count


def _column(values: Sequence[Any] | NDArray[Any]) -> pa.Array:
    if isinstance(values, np.ndarray) and values.ndim == 2:
        starts = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
        return pa.ListArray.from_arrays(starts, pa.array(values.ravel()))
    nested = len(values) and isinstance(values[0], Sequence)
    first = next(chain.from_iterable(values), 0) if nested else next(iter(values), 0)
    kind = pa.float32() if isinstance(first, float) else pa.int32()
    return pa.array(values, pa.list_(kind) if nested else kind)
