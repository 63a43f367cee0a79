"""Reading text examples: a file, a folder of files, or a data set of the hub.

A plain text file is one document; a row of JSONL, CSV, TSV or parquet is one document.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
from datasets import Dataset

from headprune import hub
from headprune.config import DataConfig
from headprune.errors import DataError
from headprune.registry import did_you_mean

_BUILDERS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
    ".raw": "text",
    ".md": "text",
}


@dataclass(frozen=True)
class Examples:
    """Documents with what belongs to them.

    Attributes:
        texts: One tuple per example: the text, or the two texts of a pair.
        labels: One label or score per example, or None.
        rows_are_documents: False for plain text files.
    """

    texts: Sequence[tuple[str, ...]]
    labels: Sequence[str] | None
    rows_are_documents: bool


def read_examples(data: DataConfig) -> Examples:
    """Reads the examples that a data config names.

    Raises:
        DataError: If nothing is there, a column is missing, or there is no text in it.
    """
    refuse_missing_file(data.source)
    files = _files(data.source)
    kinds = {_kind(file) for file in files}
    if len(kinds) > 1:
        raise DataError(
            f"'{data.source}' mixes files of {len(kinds)} kinds ({', '.join(sorted(kinds))}). "
            "Put one kind in a folder."
        )
    if kinds == {"text"}:
        texts = [(_read_text(file),) for file in files]
        return _checked(Examples(texts, None, rows_are_documents=False), data)
    table = _table(files, kinds.pop() if kinds else None, data)
    columns = _text_columns(table, data)
    texts = list(zip(*(map(str, table[column]) for column in columns), strict=True))
    labels = None
    if data.label_column is not None:
        _check_column(data.label_column, table, "--label-column", data.source)
        labels = _labels(table, data.label_column)
    return _checked(Examples(texts, labels, rows_are_documents=True), data)


def refuse_missing_file(source: str) -> None:
    """Refuses the path of a file or folder that is not there; other names may be of the hub.

    Raises:
        DataError: If there is no such file.
    """
    path = Path(source)
    named = _suffix(path) in _BUILDERS or path.is_absolute() or source.startswith(".")
    if named and not path.exists():
        raise DataError(f"There is no file '{source}'. Paths are relative to where you are.")


def _files(source: str) -> list[Path]:
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.is_file() and _suffix(f) in _BUILDERS)
        if not files:
            raise DataError(
                f"The folder '{source}' has no file with one of the endings "
                f"{', '.join(sorted(_BUILDERS))} (also .gz)."
            )
        return files
    return []


def _suffix(file: Path) -> str:
    return Path(file.stem).suffix.lower() if file.suffix == ".gz" else file.suffix.lower()


def _kind(file: Path) -> str:
    if _suffix(file) not in _BUILDERS:
        raise DataError(
            f"'{file}' has an ending that says nothing of its format. Known are "
            f"{', '.join(sorted(_BUILDERS))} (also .gz)."
        )
    return _BUILDERS[_suffix(file)]


def _read_text(file: Path) -> str:
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        return raw.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"'{file}' is not readable as UTF-8 text ({error}).") from None


def _table(files: list[Path], builder: str | None, data: DataConfig) -> Dataset:
    try:
        if builder is None:
            return _of_the_hub(data)
        options = {"sep": "\t"} if _suffix(files[0]) == ".tsv" else {}
        names = [str(file) for file in files]
        return datasets.load_dataset(builder, data_files=names, split="train", **options)
    except DataError:
        raise
    except Exception as error:  # builders raise whatever their parser raises
        found = "is no file or folder, and" if builder is None else "was found, but"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"'{data.source}' {found} datasets could not read it: {reason}") from None


def _of_the_hub(data: DataConfig) -> Dataset:
    path, _, name = data.source.partition(":")
    try:
        with hub.asked_once(path):
            return datasets.load_dataset(path, name or None, split=data.split)
    except Exception:
        if not hub.may_be_id(path) or (why_not := hub.why_not()) is None:
            raise
        raise DataError(
            f"'{data.source}' is no file or folder, nor a data set in the cache of the hub, "
            f"which cannot be asked ({why_not}). Check the name and the network."
        ) from None


def _text_columns(table: Dataset, data: DataConfig) -> list[str]:
    if data.text_column is not None:
        columns = [column.strip() for column in data.text_column.split(",")]
        for column in columns:
            _check_column(column, table, "--text-column", data.source)
        return columns
    if "text" in table.column_names:
        return ["text"]
    strings = [
        name
        for name, feature in table.features.items()
        if getattr(feature, "dtype", None) in ("string", "large_string")
        and name != data.label_column
    ]
    if len(strings) != 1:
        raise DataError(
            f"'{data.source}' has the columns {', '.join(table.column_names)}; say which one holds "
            "the text with --text-column."
        )
    return strings


def _check_column(column: str, table: Dataset, option: str, source: str) -> None:
    if column not in table.column_names:
        raise DataError(
            f"{option} {column}: '{source}' has no such column."
            f"{did_you_mean(column, table.column_names)} It has {', '.join(table.column_names)}."
        )


def _labels(table: Dataset, column: str) -> list[str]:
    feature = table.features[column]
    if isinstance(feature, datasets.ClassLabel):
        return [feature.int2str(value) for value in table[column]]
    return [str(value) for value in table[column]]


def _checked(examples: Examples, data: DataConfig) -> Examples:
    if not any(part.strip() for text in examples.texts for part in text):
        raise DataError(f"'{data.source}' holds no text. Give a file with text in it.")
    return examples
