"""The cells of tables in text files, as they are written.

A cell of CSV or TSV is text, never a number or a date; only an empty one is missing. Cells of CSV
may stand in quotes (RFC 4180). In TSV a quote is a character, so a row is a line.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path

import pyarrow as pa
from datasets import Dataset

from headprune.config.data import suffix
from headprune.data.files import stored, text_pieces
from headprune.errors import DataError

_AT_ONCE = 1000  # rows
_LONGEST = 2**31 - 1  # characters of a cell
_WRONG = {
    ".csv": "Put cells with separators, quotes or line breaks in quotes, and double quotes inside. "
    "A file with tabs, where quotes are characters, is .tsv.",
    ".tsv": "A tab separates cells, and a line break rows. A file with cells in quotes is .csv.",
}


def of_tables(files: Sequence[Path]) -> Dataset:
    """Return the rows of CSV and TSV files with the same columns. Columns without a name are lost.

    Raises:
        DataError: If one cannot be read, a row has more or fewer cells than the first, or there is
            none.
    """
    first: list[str] = []

    def parts() -> Iterator[Mapping[str, pa.Array]]:
        found = False
        for file in files:
            rows = _rows(file)
            names = next(rows, [])
            _refuse_other_names(names, first or names, file)
            first[:] = first or names
            while some := list(islice(rows, _AT_ONCE)):
                found = True
                columns = dict(zip(names, zip(*some, strict=True), strict=True))
                yield {name: _texts(columns[name]) for name in first if name}
        if not found:
            raise DataError(f"'{files[0]}' has no rows. Give a file with rows below the names.")

    return stored(parts())


def _texts(cells: Sequence[str]) -> pa.Array:
    return pa.array([cell or None for cell in cells], pa.string())


def _refuse_other_names(names: list[str], first: list[str], file: Path) -> None:
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"'{file}' has two columns called '{twice}'. Rename one.")
    if sorted(names) != sorted(first):
        raise DataError(
            f"'{file}' has the columns {', '.join(names)}, and a file before it "
            f"{', '.join(first)}. Keep files of the same columns in a folder."
        )


def _rows(file: Path) -> Iterator[list[str]]:
    """Yield the names of the columns, and rows with as many cells; blank lines are no rows."""
    ending, count = suffix(file), 0
    for line, row in _tsv(file) if ending == ".tsv" else _csv(file):
        if row in ([], [""]):
            continue
        count = count or len(row)
        if len(row) != count:
            raise DataError(
                f"'{file}', line {line}: this row has {len(row)} cells, and the first has {count}. "
                f"{_WRONG[ending]}"
            )
        yield row


def _tsv(file: Path) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(_lines(file), 1):
        yield number, line.removesuffix("\n").removesuffix("\r").split("\t")


def _csv(file: Path) -> Iterator[tuple[int, list[str]]]:
    lines = _lines(file)
    names = next(lines, "")
    csv.field_size_limit(_LONGEST)
    separator = max(",;\t|", key=re.sub('"[^"]*"', "", names).count)  # the comma, without any
    reader = csv.reader(chain([names], lines), delimiter=separator, strict=True)
    while True:
        begins = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(
                f"'{file}', line {begins}: the row that begins here is no CSV ({error}). "
                f"{_WRONG['.csv']}"
            ) from None
        yield begins, row


def _lines(file: Path) -> Iterator[str]:
    """Yield lines with their ends; only a line feed ends one."""
    held = ""
    for piece in text_pieces(file):
        *lines, held = (held + piece).split("\n")
        yield from (f"{line}\n" for line in lines)
    if held:
        yield held


def json_lines(file: Path, target: Path) -> Path:
    """Return a file of JSON as it is, or a list written anew with a row per line."""
    if not next(text_pieces(file), "").lstrip().startswith("["):
        return file
    try:
        rows = json.loads("".join(text_pieces(file)))
    except (ValueError, RecursionError):
        return file  # datasets says where it is damaged
    texts = (row if isinstance(row, dict) else {"text": row} for row in rows)
    target.write_text("".join(f"{json.dumps(row)}\n" for row in texts), encoding="utf-8")
    return target


def with_dates(table: Dataset, files: Sequence[Path]) -> Dataset:
    """Return the rows of JSON lines with strings that pyarrow took for dates as strings."""
    for name, kind in table.features.items():
        if str(getattr(kind, "dtype", "")).startswith("timestamp"):
            rows = (json.loads(line) for file in files for line in _lines(file) if line.strip())
            cells = [row.get(name) for row in rows]
            table = table.add_column(f"{name} as text", cells).remove_columns(name)
            table = table.rename_column(f"{name} as text", name)
    return table
