"""The columns of a table: texts, and labels as strings."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset
from numpy.typing import NDArray

from headprune.config import DataConfig
from headprune.data.chats import holds_chats
from headprune.errors import DataError, HeadpruneWarning
from headprune.registry import did_you_mean

_MOST_WORDS = 3  # of the name of a column
_AT_ONCE = 1000  # rows
_EXACT = 2**53  # a float64 holds every whole number below


def text_columns(table: Dataset, data: DataConfig, named: bool) -> list[str]:
    """Return the columns of the texts.

    Args:
        table: The rows.
        data: Settings, perhaps with the columns.
        named: True if the table surely names its columns; a CSV file may have no header.

    Raises:
        DataError: If the columns are unclear, or one holds no text.
    """
    strings = [
        name
        for name, feature in table.features.items()
        if getattr(feature, "dtype", None) in ("string", "large_string")
    ]
    if data.text_column is not None:
        columns = [column.strip() for column in data.text_column.split(",")]
        if len(columns) > 2:
            raise DataError(f"--text-column {data.text_column}: an example has two texts at most.")
        for column in columns:
            _refuse_missing_column(column, table, "--text-column", data.source)
    elif "text" in table.column_names:
        columns = ["text"]
    else:
        chats = [name for name in table.column_names if holds_chats(table, name)]
        words = [name for name in table.column_names if holds_words(table, name)]
        single = words if len(words) == 1 else []
        texts = [n for n in strings if named or not _holds_numbers(table, n)]
        columns = chats or [n for n in texts if n != data.label_column] or single
        if not named and any(map(_is_no_name, table.column_names)):
            raise DataError(
                f"'{data.source}' has no header row: its first row is "
                f"{', '.join(table.column_names)[:60]!r}. Add one, or give --text-column."
            )
        if len(columns) != 1:
            raise DataError(
                f"'{data.source}' has the columns {', '.join(table.column_names)}: name the text "
                "with --text-column (of pairs both: --text-column SOURCE,TARGET)."
            )
    for column in columns:
        if not (column in strings or holds_chats(table, column) or holds_words(table, column)):
            raise DataError(
                f"The column '{column}' of '{data.source}' holds no text. Columns of text: "
                f"{', '.join(strings) or 'none'}; see --text-column."
            )
    if data.label_column is not None:
        _refuse_missing_column(data.label_column, table, "--label-column", data.source)
    return columns


def _refuse_missing_column(column: str, table: Dataset, option: str, source: str) -> None:
    if column not in table.column_names:
        hint = did_you_mean(column, table.column_names)
        raise DataError(
            f"{option} {column}: '{source}' has no such column.{hint} It has "
            f"{', '.join(table.column_names)}."
        )


def holds_words(table: Dataset, column: str) -> bool:
    """Return whether a column holds lists of words."""
    return getattr(getattr(table.features[column], "feature", None), "dtype", None) == "string"


def _holds_numbers(table: Dataset, column: str) -> bool:
    """Return whether a column of CSV holds nothing but numbers, or nothing but true and false."""
    for kind in (pa.float64(), pa.bool_()):
        with suppress(pa.ArrowInvalid):
            pc.cast(table.data.column(column), kind)
            return True
    return False


def _is_no_name(column: str) -> bool:
    return len(column.split()) > _MOST_WORDS or re.fullmatch(r"[+-]?[\d.]+", column) is not None


def without_nulls(table: Dataset, columns: list[str], data: DataConfig) -> Dataset:
    """Return the rows with a text, and warn of others; "" is none in any file.

    Raises:
        DataError: If a label is missing.
    """
    empty = _nulls(table, columns)
    if empty.any():
        table = table.select(np.flatnonzero(~empty))
        warnings.warn(
            f"'{data.source}': {int(empty.sum()):,} of {len(empty):,} rows have no text in "
            f"{' or '.join(columns)} and are left out; {len(table):,} are used.",
            HeadpruneWarning,
            stacklevel=3,
        )
    if data.label_column is not None:
        empty = _nulls(table, [data.label_column], lists=False)  # several labels may be none
        if empty.any():
            raise DataError(
                f"--label-column {data.label_column}: {int(empty.sum()):,} rows of "
                f"'{data.source}' have a text and no label. Label them, or leave them out."
            )
    return table


def _nulls(table: Dataset, columns: list[str], lists: bool = True) -> NDArray[np.bool_]:
    batches = table.select_columns(columns).with_format("arrow").iter(_AT_ONCE)
    masks = [
        np.any([_is_empty(batch[name], lists).to_numpy() for name in columns], axis=0)
        for batch in batches
    ]
    return np.concatenate([np.zeros(0, np.bool_), *masks])


def _is_empty(cells: pa.ChunkedArray, lists: bool) -> pa.ChunkedArray:
    if pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type):
        return pc.equal(pc.fill_null(cells, ""), "")
    if lists and (pa.types.is_list(cells.type) or pa.types.is_large_list(cells.type)):
        return pc.equal(pc.fill_null(pc.list_value_length(cells), 0), 0)
    return pc.is_null(cells)


def label_texts(table: Dataset, column: str) -> Callable[[dict[str, list[Any]]], list[str]]:
    """Return a function from rows to their labels as strings, by name where classes have one."""
    feature = table.features[column]
    kind = getattr(feature, "feature", feature)  # of each label of a row

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(one) for one in value]
        if isinstance(kind, ClassLabel):
            return str(kind.int2str(value))
        if not isinstance(value, float):
            return value
        if value.is_integer() and abs(value) >= _EXACT:
            raise DataError(
                f"--label-column {column}: {value:.0f} is beyond 2**53, where numbers are rounded. "
                "Write such labels as strings."
            )
        return float(str(np.float32(value))) if getattr(kind, "dtype", "") == "float32" else value

    def written(value: Any) -> str:
        if isinstance(value, float) and value.is_integer():
            return str(int(value))
        return json.dumps(value, default=str) if isinstance(value, bool | list) else str(value)

    def texts(batch: dict[str, list[Any]]) -> list[str]:
        values = batch[column]
        if None in values:
            raise DataError(
                f"--label-column {column}: a row has no label. Label it or leave it out."
            )
        try:
            return [written(plain(value)) for value in values]
        except ValueError:  # test sets without labels have -1 there
            raise DataError(
                f"--label-column {column}: a row has none of the labels "
                f"{', '.join(kind.names)}. Give labelled data, such as another split."
            ) from None

    return texts
