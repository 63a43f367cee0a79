"""Files of data, their text in pieces, and rows kept on disk."""

from __future__ import annotations

import codecs
import gzip
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from numpy.typing import NDArray

from headprune.errors import DataError

_PIECE = 1 << 18  # bytes per read


def visible(folder: Path, pattern: str = "*") -> list[Path]:
    """Return the files below a folder, sorted, as datasets sees them.

    Files and folders whose name begins with a dot are none, such as .ipynb_checkpoints, ._a.txt
    and .DS_Store; nor are folders such as __MACOSX.
    """
    files = (file for file in folder.rglob(pattern) if file.is_file())
    return sorted(file for file in files if not _is_hidden(file.relative_to(folder)))


def _is_hidden(file: Path) -> bool:
    of_folder = any(part.startswith("__") for part in file.parts[:-1])
    return of_folder or any(part.startswith((".", "~$")) for part in file.parts)


def text_pieces(file: Path) -> Iterator[str]:
    """Yield the text of a file, a piece at a time.

    Raises:
        DataError: If it cannot be read, is damaged, or is no UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    at = 0
    try:
        for piece in byte_pieces(file):
            at += len(piece)
            if text := decoder.decode(piece):
                yield text
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        at += error.start - len(error.object)
        raise DataError(
            f"'{file}' is not readable as UTF-8 text ({error.reason} at byte {at:,}). Save it as "
            "UTF-8."
        ) from None


def byte_pieces(file: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, unpacked.

    Raises:
        DataError: If it cannot be read, or is damaged.
    """
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            while piece := stream.read(_PIECE):
                yield piece
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"'{file}' is not readable ({error}).") from None


def stored(parts: Iterable[Mapping[str, Any]]) -> Dataset:
    """Write rows to a temporary file, and read them from there.

    The file has no name on return, so that no crash leaves it behind. ``Dataset.from_generator``
    leaves one, and wraps our errors. ``parts`` are columns of rows: numbers, lists of numbers, or
    an array of shape (rows, length); or arrays of Arrow.

    Raises:
        DataError: If the disk is full.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="headprune-") as folder:
            path, writer = Path(folder) / "rows.arrow", None
            with pa.OSFile(str(path), "wb") as file:
                for part in parts:
                    batch = pa.RecordBatch.from_pydict({n: _column(v) for n, v in part.items()})
                    writer = writer or pa.ipc.new_stream(file, batch.schema)
                    writer.write_batch(batch)
                if writer is None:
                    return Dataset.from_dict({"input_ids": [], "attention_mask": []})
                writer.close()
            return Dataset.from_file(str(path))
    except OSError as error:
        raise DataError(
            f"Rows could not be kept in '{tempfile.gettempdir()}' ({error}). Make room "
            "there, or name another folder in the variable TMPDIR."
        ) from None


def _column(values: Sequence[Any] | NDArray[Any] | pa.Array) -> pa.Array:
    if isinstance(values, pa.Array):
        return values
    if isinstance(values, np.ndarray) and values.ndim == 2:
        starts = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
        return pa.ListArray.from_arrays(starts, pa.array(values.ravel()))
    nested = len(values) and isinstance(values[0], Sequence)
    first = next(chain.from_iterable(values), 0) if nested else next(iter(values), 0)
    kind = pa.float32() if isinstance(first, float) else pa.int32()
    return pa.array(values, pa.list_(kind) if nested else kind)
