"""The cells of tables in text files, as they are written.

A cell of CSV or TSV is text, never a number or a date; only an empty one is missing. Cells of CSV
may stand in quotes (RFC 4180). In TSV a quote is a character, so a row is a line.
"""

from __future__ import annotations

import csv
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, Features, concatenate_datasets

from headprune.config.data import suffix
from headprune.data.files import stored, text_pieces
from headprune.errors import DataError, HeadpruneWarning

_AT_ONCE = 1000  # rows
_QUOTED = re.compile('"([^"]|"")*""([^"]|"")*"')  # a quote inside is doubled
_LONGEST = 2**31 - 1  # characters of a cell
_RETURN = "a carriage return (CR) alone ends no line. Save the file with line ends LF or CRLF."
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
        if not count and re.fullmatch("sep=.?", "".join(row), re.IGNORECASE):
            raise DataError(f"'{file}' begins with Excel's line sep=, no row: remove that line.")
        count = count or len(row)
        if len(row) != count:
            raise DataError(
                f"'{file}', line {line}: this row has {len(row)} cells, and the first has {count}. "
                f"{_WRONG[ending]}"
            )
        yield row


def _tsv(file: Path) -> Iterator[tuple[int, list[str]]]:
    quoted = False
    for number, line in enumerate(_lines(file), 1):
        row = line.removesuffix("\n").removesuffix("\r")
        if number == 1 and "\r" in row:
            raise DataError(f"'{file}', line 1: {_RETURN}")
        cells = row.split("\t")
        if not quoted and (quoted := any(map(_QUOTED.fullmatch, cells))):
            warnings.warn(
                f"'{file}', line {number}: a quote of TSV is a character, and cells look quoted as "
                "in CSV. If they are, name the file .csv: it may have tabs, too.",
                HeadpruneWarning,
                stacklevel=3,
            )
        yield number, cells


def _csv(file: Path) -> Iterator[tuple[int, list[str]]]:
    lines, read = _lines(file), list[str]()  # of a row
    names = next(lines, "")
    csv.field_size_limit(_LONGEST)
    outside = re.sub('"[^"]*"', "", names)
    separator = max(",;\t|", key=outside.count)  # the comma, without any
    count, odd = outside.count(separator), list[int]()

    def noted() -> Iterator[str]:
        for line in chain([names], lines):
            read.append(line)
            yield line

    reader = csv.reader(noted(), delimiter=separator, strict=True)
    while True:
        begins = reader.line_num + 1
        read.clear()
        try:
            row = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            if "new-line" in str(error):
                raise DataError(f"'{file}', line {begins}: {_RETURN}") from None
            raise DataError(
                f"'{file}', line {begins}: the row that begins here is no CSV ({error}). "
                f"{_WRONG['.csv']}"
            ) from None
        if len(read) > 1 and count and all(line.count(separator) >= count for line in read):
            odd.append(begins)
        yield begins, row
    if odd:
        warnings.warn(
            f"'{file}', line {odd[0]}: a cell in quotes spans lines that look like rows of their "
            f"own (of {len(odd):,} such rows the first). If they are rows, double the quotes.",
            HeadpruneWarning,
            stacklevel=2,
        )


def _lines(file: Path) -> Iterator[str]:
    """Yield lines with their ends; only a line feed ends one."""
    held = ""
    for piece in text_pieces(file):
        *lines, held = (held + piece).split("\n")
        yield from (f"{line}\n" for line in lines)
    if held:
        yield held


def json_lines(file: Path, target: Path) -> Path:
    """Return a file of JSON as it is, or a list written anew with a row per line.

    Raises:
        DataError: If it holds columns, or rows that are neither objects nor strings.
    """
    start = next(text_pieces(file), "").lstrip()
    if not start.startswith("[") and (suffix(file) != ".json" or _has_lines(start)):
        return file
    try:
        rows = json.loads("".join(text_pieces(file)))
    except (ValueError, RecursionError):
        return file  # datasets says where it is damaged
    if isinstance(rows, dict) and not all(map(_is_column, rows.values())):
        rows = [rows]
    if not isinstance(rows, list) or not all(isinstance(row, dict | str) for row in rows):
        raise DataError(
            f"'{file}' holds columns, or rows without names. Give a list of rows, such as "
            '[{"text": "..."}], or JSONL.'
        )
    texts = (row if isinstance(row, dict) else {"text": row} for row in rows)
    target.write_text("".join(f"{json.dumps(row)}\n" for row in texts), encoding="utf-8")
    return target


def _has_lines(start: str) -> bool:
    first, _, more = start.partition("\n")
    with suppress(ValueError):
        json.loads(first)
        return bool(more.strip())
    return False


def _is_column(value: Any) -> bool:
    """Return whether a value may be a column of rows; a list of objects is a chat."""
    return isinstance(value, dict | list) and not isinstance(next(iter(value), None), dict)


def with_dates(table: Dataset, files: Sequence[Path]) -> Dataset:
    """Return the rows of JSON lines with strings that pyarrow took for dates as strings."""
    kinds = re.sub(r'"timestamp\[[^"]*"', '"string"', json.dumps(table.features.to_dict()))
    for name, kind in Features.from_dict(json.loads(kinds)).items():
        if kind != table.features[name]:
            rows = (json.loads(line) for file in files for line in _lines(file) if line.strip())
            cells = {name: [row.get(name) for row in rows]}
            as_text = Dataset.from_dict(cells, Features({name: kind}))
            table = concatenate_datasets([table.remove_columns(name), as_text], axis=1)
    return table
