"""Files of text as streams: gzip is unpacked as it is read, up to a bound, and all is UTF-8."""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np

from headprune.errors import DataError

PIECE = 1 << 18  # bytes that are read at once
MOST_RATIO = 100  # gzip makes text 3 to 20 times smaller, and zeros a thousand times
ANY_RATIO = 1 << 26  # bytes that a file may unpack to whatever its ratio: they harm nobody
MOST_DEPTH = 500  # of JSON; pyarrow needs a part of the stack for each level, and dies without
_STEP = np.zeros(256, np.int8)
_STEP[list(b"[{")], _STEP[list(b"]}")] = 1, -1
_QUOTE, _NEWLINE, _OF_NULL = b'"\nn'
_IDLE = bytes(set(range(256)) - set(b'[]{}"\nn'))


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
        DataError: If it cannot be read, is damaged, unpacks to far more than text does, or is no
            UTF-8.
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
        DataError: If it cannot be read, is damaged, or unpacks to far more than text does.
    """
    packed = file.suffix == ".gz"
    try:
        most = max(ANY_RATIO, MOST_RATIO * file.stat().st_size) if packed else None
        total = 0
        with gzip.open(file) if packed else file.open("rb") as stream:
            while piece := stream.read(PIECE):
                total += len(piece)
                if most is not None and total > most:
                    raise DataError(
                        f"'{file}' unpacks to more than {MOST_RATIO} times its size (over "
                        f"{most:,} bytes). Text packs 3 to 20 times smaller, so this file may be "
                        "made to fill a machine. If it is what you want, unpack it and give the "
                        "file in it."
                    )
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
        DataError: If it is damaged or unpacks to far more than text does.
    """
    if file.suffix != ".gz":
        return file
    whole = folder / f"{number}-{file.stem}"
    with whole.open("wb") as target:
        for piece in byte_pieces(file):
            target.write(piece)
    return whole


def refuse_fatal_json(file: Path) -> None:
    """Refuses JSON, one value or one a line, of which pyarrow dies.

    Raises:
        DataError: If a row is null, lists and objects are nested too deeply, or the file cannot be
            read.
    """
    cut, level, quotes = b"", 0, 0
    for piece in byte_pieces(file):
        plain, cut = cut + piece, b""
        if b"\\" in plain:
            plain = plain.replace(rb"\\", b"")
            cut = b"\\" if plain.endswith(b"\\") else b""
            plain = plain.replace(rb"\"", b"")
        found = np.frombuffer(plain.translate(None, _IDLE), np.uint8)
        if not len(found):
            continue
        quoted = quotes + np.cumsum(found == _QUOTE)
        # no string spans lines, so that a lone quote spoils its own line only
        until_line = np.maximum.accumulate(np.where(found == _NEWLINE, quoted, 0))
        outside = (quoted - until_line) % 2 == 0
        levels = level + np.cumsum(_STEP[found] * outside)
        if levels.max() > MOST_DEPTH:
            raise DataError(
                f"'{file}' is not readable: it has lists or objects in one another, more than "
                f"{MOST_DEPTH} deep."
            )
        if np.any(outside & (levels == 0) & (found == _OF_NULL)):
            raise DataError(f"'{file}' is not readable: a row of it is null. Leave it out.")
        level, quotes = int(levels[-1]), int(quoted[-1] - until_line[-1])
