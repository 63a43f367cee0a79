"""Reading text examples: a file, a folder of files, or a data set of the hub.

A plain text file is one document; a row of JSONL, CSV, TSV, parquet or arrow is one document.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import datasets
import numpy as np
import pyarrow.compute as pc
from datasets import Dataset
from datasets.data_files import FILES_TO_IGNORE
from numpy.typing import NDArray

from headprune.config import DataConfig
from headprune.data.files import TextFiles, byte_pieces, refuse_nulls, text_pieces, unpacked
from headprune.data.rows import evenly, let_go
from headprune.errors import DataError, HeadpruneWarning
from headprune.io import hub
from headprune.io.folders import digest_of, hashes_of
from headprune.io.parsing import read_json
from headprune.registry import did_you_mean

T = TypeVar("T")
if TYPE_CHECKING:
    Texts = Sequence[tuple[str, ...]]
    Labels = Sequence[str]
else:  # whoever checks types at run time looks at an item, which would read a file
    Texts = Labels = Sequence

_AT_ONCE = 100  # rows of a table that are read; they may be long
_MOST_WORDS = 3  # of the name of a column
_MOST_NAMES = 1 << 16  # characters of the first row of a CSV file
_MOST_HELD = 1 << 26  # bytes of a table that stay in memory when they were read

_BUILDERS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
    ".text": "text",
    ".raw": "text",
    ".md": "text",
}


@dataclass(frozen=True)
class Examples:
    """Documents with what belongs to them, read from where they lie whenever they are asked for.

    Attributes:
        texts: One tuple per example: the text, or the two texts of a pair.
        labels: One label or score per example, or None.
        rows_are_documents: False for plain text files.
    """

    texts: Texts
    labels: Labels | None
    rows_are_documents: bool

    @property
    def width(self) -> int:
        """Texts of an example: 2 for pairs."""
        return 1 if isinstance(self.texts, TextFiles) else len(self.texts[0])

    def spread(self, count: int | None) -> Examples:
        """Return so many examples, evenly from all over them; None for all."""
        if count is None or count >= len(self.texts):
            return self
        numbers = evenly(len(self.texts), count)
        labels = None if self.labels is None else _chosen(self.labels, numbers)
        return Examples(_chosen(self.texts, numbers), labels, self.rows_are_documents)

    def documents(self) -> Iterator[Iterator[str]]:
        """The (first) text of every example, a piece at a time."""
        if isinstance(self.texts, TextFiles):
            yield from map(text_pieces, self.texts.files)
        else:
            yield from (iter((text,)) for text, *_ in self.texts)

    def strings(self) -> Iterator[str]:
        """All text there is, a piece at a time."""
        if isinstance(self.texts, TextFiles):
            yield from chain.from_iterable(self.documents())
        else:
            yield from chain.from_iterable(self.texts)

    @cached_property
    def sha256(self) -> str:
        """Digest of the texts and labels, in order."""
        digest = hashlib.sha256()
        if isinstance(self.texts, TextFiles):
            for file in self.texts.files:
                for piece in byte_pieces(file):
                    digest.update(piece)
                digest.update(b"\0")
        else:
            for part in chain.from_iterable(self.texts):
                digest.update(part.encode() + b"\0")
        for label in self.labels or ():
            digest.update(label.encode() + b"\0")
        return digest.hexdigest()


def _chosen(rows: Sequence[T], numbers: list[int]) -> Sequence[T]:
    select = getattr(rows, "select", lambda some: [rows[number] for number in some])
    chosen: Sequence[T] = select(numbers)
    return chosen


def read_examples(data: DataConfig) -> Examples:
    """Reads the examples that a data config names.

    Files are looked through once, so that what is wrong with them is found before any work.

    Raises:
        DataError: If nothing is there, a column is missing, or there is no text in it.
    """
    refuse_missing_file(data.source)
    files = _files(data)
    kinds = {_kind(file) for file in files}
    if len(kinds) > 1:
        raise DataError(
            f"'{data.source}' mixes files of {len(kinds)} kinds ({', '.join(sorted(kinds))}). "
            "Put one kind in a folder."
        )
    if kinds == {"text"}:
        texts = TextFiles(tuple(files))
        return _checked(Examples(texts, None, rows_are_documents=False), data)
    builder = kinds.pop() if kinds else None
    table = _table(files, builder, data)
    columns = _text_columns(table, data, named=builder != "csv")
    if data.label_column is not None:
        _check_column(data.label_column, table, "--label-column", data.source)
    table = _without_nulls(table, columns, data)
    return _checked(_examples(table, columns, data), data)


class _Rows(Sequence[T]):
    """What is made of the rows of a table, some at a time."""

    def __init__(
        self, table: Dataset, made: Callable[[dict[str, list[Any]]], list[T]], source: str
    ) -> None:
        self.table, self.made, self.source = table, made, source

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> _Rows[T]: ...
    def __getitem__(self, index: int | slice) -> T | _Rows[T]:
        if isinstance(index, slice):
            return self.select(range(len(self))[index])
        return next(iter(self[index : index + 1 or None]))

    def select(self, numbers: Sequence[int]) -> _Rows[T]:
        """Return some of them."""
        return _Rows(self.table.select(numbers), self.made, self.source)

    def __iter__(self) -> Iterator[T]:
        held = 0
        try:
            for some in self.table.with_format("arrow").iter(_AT_ONCE):
                yield from self.made(some.to_pydict())
                held += some.nbytes
                if held > _MOST_HELD:
                    let_go(self.table)
                    held = 0
        except UnicodeDecodeError as error:
            raise DataError(
                f"'{self.source}' is not readable as UTF-8 text ({error.reason} in a row). Write "
                "it anew as UTF-8."
            ) from None


def _examples(table: Dataset, columns: list[str], data: DataConfig) -> Examples:
    def texts(rows: dict[str, list[Any]]) -> list[tuple[str, ...]]:
        return list(zip(*(rows[column] for column in columns), strict=True))

    labels = None
    if data.label_column is not None:
        labels = _labels(table.select_columns([data.label_column]), data)
    rows = _Rows(table.select_columns(columns), texts, data.source)
    return Examples(rows, labels, rows_are_documents=True)


def refuse_missing_file(source: str) -> None:
    """Refuses the path of a file or folder that is not there; other names may be of the hub.

    Raises:
        DataError: If there is no such file.
    """
    path = Path(source)
    named = _suffix(path) in _BUILDERS or path.is_absolute() or source.startswith(".")
    if named and not path.exists():
        raise DataError(f"There is no file '{source}'. Paths are relative to where you are.")


def digest_of_data(data: DataConfig) -> str:
    """Digest of the local files that are read; a data set of the hub is known by name and split.

    Raises:
        DataError: If a folder has no file of text, or one that is not readable.
    """
    place = Path(data.source)
    if not place.exists():
        return f"hub:{data.source}:{data.split}"
    folder = place if place.is_dir() else place.parent
    names = (str(file.relative_to(folder)) for file in _files(data))
    try:
        return digest_of(hashes_of(folder, names))
    except OSError as error:
        raise DataError(f"'{data.source}' is not readable ({error}).") from None


def _files(data: DataConfig) -> list[Path]:
    source, path = data.source, Path(data.source)
    if path.is_file():
        return [path]
    if path.is_dir():
        if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
            raise DataError(
                f"'{source}' is the folder of a model, and text is what is asked for. Give a file "
                "of text or of a table, or a folder of such files."
            )
        if (path / "dataset_dict.json").is_file():  # of datasets' save_to_disk
            splits = sorted(folder.name for folder in path.iterdir() if folder.is_dir())
            if data.split not in splits:
                raise DataError(
                    f"split {data.split}: '{source}' has no such split."
                    f"{did_you_mean(data.split, splits)} It has {', '.join(splits)}."
                )
            path /= data.split
        files = sorted(f for f in path.rglob("*") if f.is_file() and _suffix(f) in _BUILDERS)
        if (path / "dataset_info.json").is_file() and (path / "state.json").is_file():
            files = [path / name for name in _saved_in(path / "state.json")]
        rows = [file for file in files if file.name not in FILES_TO_IGNORE]
        if any(_BUILDERS[_suffix(file)] != "text" for file in rows):  # Markdown is about the data
            rows = [file for file in rows if _suffix(file) != ".md"]
        if any(_suffix(file) != ".md" for file in rows):  # README.md is the card of the data
            files = rows
        if not files:
            raise DataError(
                f"The folder '{source}' has no file with one of the endings "
                f"{', '.join(sorted(_BUILDERS))} (also .gz)."
            )
        return files
    return []


def _saved_in(state: Path) -> list[str]:
    """Name the files that ``save_to_disk`` wrote; datasets keeps caches of its own beside them."""
    content = read_json(state, DataError)
    try:
        return [Path(file["filename"]).name for file in content["_data_files"]]
    except (TypeError, KeyError):
        raise DataError(
            f"'{state}' does not say which files hold the rows. Save the data set again."
        ) from None


def _suffix(file: Path) -> str:
    return Path(file.stem).suffix.lower() if file.suffix == ".gz" else file.suffix.lower()


def _kind(file: Path) -> str:
    if _suffix(file) not in _BUILDERS:
        raise DataError(
            f"'{file}' has an ending that says nothing of its format. Known are "
            f"{', '.join(sorted(_BUILDERS))} (also .gz)."
        )
    return _BUILDERS[_suffix(file)]


def _table(files: list[Path], builder: str | None, data: DataConfig) -> Dataset:
    try:
        if builder is None:
            return _of_the_hub(data)
        return _of_files(files, builder)
    except (DataError, MemoryError):
        raise
    except Exception as error:  # builders raise whatever their parser raises
        found = "is no file or folder, and" if builder is None else "was found, but"
        raise DataError(
            f"'{data.source}' {found} datasets could not read it: {_reason(error)}"
        ) from None


def _reason(error: BaseException) -> str:
    """The first line of what went wrong at the bottom of it."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, StopIteration):
        return "there are no rows in it"
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _of_files(files: list[Path], builder: str) -> Dataset:
    """Rows of files, in a temporary file that is mapped into memory and has no name any more.

    The cache of datasets is none of ours: it goes by the name and time of a file, which may both
    stay when the text changes, and it needs a home to write to.
    """
    with tempfile.TemporaryDirectory(prefix="headprune-") as folder:
        plain = [unpacked(file, Path(folder), i) for i, file in enumerate(files)]
        for file in plain if builder == "json" else ():
            refuse_nulls(file)
        cache = str(Path(folder) / "cache")
        told = datasets.logging.get_verbosity()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the error says it all
        try:
            parts = []
            for separator, some in groupby(plain, _separator):
                names = [glob.escape(str(file)) for file in some]  # they are taken for patterns
                options = {"split": "train", "cache_dir": cache}
                if separator is not None:
                    options["sep"] = separator
                parts.append(datasets.load_dataset(builder, data_files=names, **options))
            return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
        finally:
            datasets.logging.set_verbosity(told)


def _separator(file: Path) -> str | None:
    """What separates the columns of a CSV or TSV file, by its first row; None for other files."""
    if file.suffix.lower() != ".csv":
        return "\t" if file.suffix.lower() == ".tsv" else None
    with file.open(encoding="utf-8", errors="replace") as stream:
        first = re.sub('"[^"]*"', "", stream.readline(_MOST_NAMES))
    return max(",;\t|", key=first.count)  # the comma, where there is none


def _of_the_hub(data: DataConfig) -> Dataset:
    path, _, name = data.source.partition(":")
    try:
        with hub.asked_once(path):
            return datasets.load_dataset(path, name or None, split=data.split)
    except MemoryError:
        raise
    except Exception:  # of whichever client this version of datasets has
        if not hub.may_be_id(path) or (why_not := hub.why_not()) is None:
            raise
        raise DataError(
            f"'{data.source}' is no file or folder, nor a data set in the cache of the hub, "
            f"which cannot be asked ({why_not}). Check the name and the network."
        ) from None


def _text_columns(table: Dataset, data: DataConfig, named: bool) -> list[str]:
    """The columns of the texts.

    Args:
        table: The rows.
        data: Names them, perhaps.
        named: Whether the columns surely have names; the first row of a CSV file may be a text.

    Raises:
        DataError: If there are none, or which is unknown.
    """
    if data.text_column is not None:
        columns = [column.strip() for column in data.text_column.split(",")]
        for column in columns:
            _check_column(column, table, "--text-column", data.source)
    elif "text" in table.column_names:
        columns = ["text"]
    else:
        columns = _chats(table)[:1] or [n for n in _strings(table) if n != data.label_column]
        if not named and any(map(_is_no_name, table.column_names)):
            raise DataError(
                f"'{data.source}' has no header row: its first row is "
                f"{', '.join(table.column_names)[:60]!r}. Add one such as 'text', or give "
                "--text-column."
            )
        if len(columns) != 1:
            raise DataError(
                f"'{data.source}' has the columns {', '.join(table.column_names)}; say which one "
                "holds the text with --text-column (of pairs both: --text-column SOURCE,TARGET)."
            )
    for column in columns:
        if column in _chats(table):
            raise DataError(
                f"The column '{column}' of '{data.source}' holds chats, which are not read yet. "
                "Write each as one text, by tokenizer.apply_chat_template(chat, tokenize=False), "
                "into a column of its own, and name it with --text-column."
            )
        if column not in _strings(table):
            feature = table.features[column]
            kind = getattr(feature, "dtype", None) or type(feature).__name__
            raise DataError(
                f"The column '{column}' of '{data.source}' holds {kind}, no text. Columns of text: "
                f"{', '.join(_strings(table)) or 'none'}; see --text-column."
            )
    return columns


def _chats(table: Dataset) -> list[str]:
    """Columns of messages: lists of objects with a content."""
    found = []
    for name, feature in table.features.items():
        message = getattr(feature, "feature", None)
        if isinstance(message, dict) and {"content", "value"} & message.keys():
            found.append(name)
    return found


def _is_no_name(column: str) -> bool:
    """Whether it is a text or a number, rather than the name of a column."""
    return len(column.split()) > _MOST_WORDS or re.fullmatch(r"[+-]?[\d.]+", column) is not None


def _strings(table: Dataset) -> list[str]:
    kinds = {name: getattr(feature, "dtype", None) for name, feature in table.features.items()}
    return [name for name, kind in kinds.items() if kind in ("string", "large_string")]


def _without_nulls(table: Dataset, columns: list[str], data: DataConfig) -> Dataset:
    """The rows that have a text; they must have a label then.

    Raises:
        DataError: If a label is missing.
    """
    empty = _nulls(table, columns)
    if empty.any():
        left = len(table) - int(empty.sum())
        table = table.select(np.flatnonzero(~empty))
        warnings.warn(
            f"'{data.source}': {int(empty.sum()):,} of {len(empty):,} rows have no text in "
            f"{' or '.join(columns)} (null, or an empty cell) and are left out; {left:,} are used.",
            HeadpruneWarning,
            stacklevel=3,
        )
    if data.label_column is not None:
        empty = _nulls(table, [data.label_column])
        if empty.any():
            raise DataError(
                f"--label-column {data.label_column}: {int(empty.sum()):,} rows of "
                f"'{data.source}' have a text and no label, row {int(empty.argmax())} (counted "
                "from 0, rows without a text left out) the first. Label them, or leave them out."
            )
    return table


def _nulls(table: Dataset, columns: list[str]) -> NDArray[np.bool_]:
    """Which rows have nothing in one of some columns."""
    batches = table.select_columns(columns).with_format("arrow").iter(10 * _AT_ONCE)
    found = [
        np.any([pc.is_null(batch[name]).to_numpy() for name in columns], axis=0)
        for batch in batches
    ]
    return np.concatenate([np.zeros(0, np.bool_), *found])


def _check_column(column: str, table: Dataset, option: str, source: str) -> None:
    if column not in table.column_names:
        raise DataError(
            f"{option} {column}: '{source}' has no such column."
            f"{did_you_mean(column, table.column_names)} It has {', '.join(table.column_names)}."
        )


def _labels(table: Dataset, data: DataConfig) -> Labels:
    (column,) = table.column_names
    feature = table.features[column]

    def texts(rows: dict[str, list[Any]]) -> list[str]:
        if not isinstance(feature, datasets.ClassLabel):
            values = rows[column]
            names = getattr(getattr(feature, "feature", None), "names", None)
            if names:  # several classes of a row, by number
                values = [[names[number] for number in row] for row in values]
            return [json.dumps(v) if isinstance(v, list) else str(v) for v in values]
        try:
            return [str(feature.int2str(value)) for value in rows[column]]
        except ValueError:  # test sets without labels have -1 there
            raise DataError(
                f"--label-column {column}: '{data.source}' has a row whose label is none of "
                f"{', '.join(feature.names)}. Give data with labels, such as another split."
            ) from None

    return _Rows(table, texts, data.source)


def _checked(examples: Examples, data: DataConfig) -> Examples:
    blank = True
    for text in examples.strings():
        blank = blank and not text.strip()
        if examples.rows_are_documents and not blank:
            break  # files are read to their end, to see that they can be
    if blank:
        raise DataError(f"'{data.source}' holds no text. Give a file with text in it.")
    return examples
