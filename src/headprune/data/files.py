"""Files of text as streams: gzip is unpacked as it is read, and all is UTF-8."""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from headprune.errors import DataError

PIECE = 1 << 18  # bytes that are read at once


@dataclass(frozen=True)
class TextFiles(Sequence[tuple[str, ...]]):
    """Files as texts that are read only when they are asked for.

    Attributes:
        files: One a text.
    """

    files: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.files)

    def select(self, numbers: Sequence[int]) -> TextFiles:
        """Return some of them."""
        return TextFiles(tuple(self.files[number] for number in numbers))

    @overload
    def __getitem__(self, index: int) -> tuple[str, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> TextFiles: ...
    def __getitem__(self, index: int | slice) -> tuple[str, ...] | TextFiles:
        if isinstance(index, slice):
            return TextFiles(self.files[index])
        return ("".join(text_pieces(self.files[index])),)


def text_pieces(file: Path) -> Iterator[str]:
    """The text of a file, a piece at a time.

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
    """The bytes of a file, a piece at a time; those of a .gz as they were before it was packed.

    Raises:
        DataError: If it cannot be read, or is damaged.
    """
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            while piece := stream.read(PIECE):
                yield piece
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"'{file}' is not readable ({error}).") from None


def unpacked(file: Path, folder: Path, number: int) -> Path:
    """A file as libraries may read it: itself, or what a .gz holds, written to a folder.

    Args:
        file: The file.
        folder: Where to write.
        number: What tells it from others of its name.

    Raises:
        DataError: If it is damaged.
    """
    if file.suffix != ".gz":
        return file
    whole = folder / f"{number}-{file.stem}"
    with whole.open("wb") as target:
        for piece in byte_pieces(file):
            target.write(piece)
    return whole


def refuse_nulls(file: Path) -> None:
    """Refuse JSON with a row that is null, as jq writes it: pyarrow can die of one.

    Raises:
        DataError: If there is such a row.
    """
    with file.open("rb") as stream:
        lines = iter(lambda: stream.readline(PIECE), b"")
        rows = filter(None, (line.removeprefix(codecs.BOM_UTF8).strip() for line in lines))
        for number, row in enumerate(rows):
            if number == 0 and row.startswith(b"["):
                return  # one value, whose lines are no rows
            if row == b"null" or row.startswith(b"null "):
                raise DataError(f"'{file}' is not readable: a row of it is null. Leave it out.")
