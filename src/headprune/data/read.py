"""Read text: a file, a folder of files, or a data set of the hub.

A plain text file is one document; a row of a table (JSONL, CSV, TSV, parquet, arrow) is another.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
from datasets import Dataset

from headprune.config import DataConfig
from headprune.config.data import BUILDERS, Loss, refuse_missing_file, splits_of, suffix
from headprune.data.chats import BESIDE, answer_places, chat_text, chats_of, holds_chats
from headprune.data.columns import label_texts, text_columns, without_nulls
from headprune.data.files import byte_pieces, text_pieces, visible
from headprune.data.tables import json_lines, of_tables, with_dates
from headprune.data.text import evenly
from headprune.errors import DataError
from headprune.io import hub
from headprune.io.folders import digest_of, hashes_of
from headprune.registry import did_you_mean

if TYPE_CHECKING:
    Texts = Sequence[tuple[str, ...]]
    Labels = Sequence[str]
else:  # beartype looks at an item, which would read a file
    Texts = Labels = Sequence

_PIECE = 1 << 18  # bytes of a line
_AT_ONCE = 100  # rows of a table per read; they may be long

_ENDINGS = f"{', '.join(sorted(BUILDERS))} (also .gz)"


@dataclass(frozen=True)
class Examples:
    """Documents and their labels, read anew at every use.

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
        """Return ``count`` examples, evenly from all over them; None for all."""
        if count is None or count >= len(self.texts):
            return self
        numbers = evenly(len(self.texts), count)
        labels = None if self.labels is None else _chosen(self.labels, numbers)
        return Examples(_chosen(self.texts, numbers), labels, self.rows_are_documents)

    def documents(self) -> Iterator[Iterator[str]]:
        """Yield the (first) text of every example, a piece at a time."""
        if isinstance(self.texts, TextFiles):
            yield from self._all_texts()
        else:
            yield from (iter(texts[:1]) for texts in self.texts)

    def strings(self) -> Iterator[str]:
        """Yield all text, a piece at a time."""
        yield from chain.from_iterable(self._all_texts())

    @cached_property
    def sha256(self) -> str:
        """Digest of the texts and labels, in order."""
        digest = hashlib.sha256()
        for pieces in chain(self._all_texts(), ((label,) for label in self.labels or ())):
            for piece in pieces:
                digest.update(piece.encode())
            digest.update(b"\0")
        return digest.hexdigest()

    def _all_texts(self) -> Iterator[Iterator[str]]:
        if isinstance(self.texts, TextFiles):
            yield from map(text_pieces, self.texts.files)
        else:
            yield from (iter((text,)) for texts in self.texts for text in texts)


def _chosen(rows: Sequence[Any], numbers: list[int]) -> Sequence[Any]:
    chosen: Sequence[Any] = (
        rows.select(numbers) if hasattr(rows, "select") else [rows[number] for number in numbers]
    )
    return chosen


@dataclass(frozen=True)
class TextFiles(Sequence[tuple[str, ...]]):
    """Files as one text each, read on use."""

    files: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: Any) -> Any:
        return ("".join(text_pieces(self.files[index])),)

    def select(self, numbers: Sequence[int]) -> TextFiles:
        """Return some of them."""
        return TextFiles(tuple(self.files[number] for number in numbers))


@dataclass(frozen=True)
class _Rows(Sequence[Any]):
    """The columns of a table after ``convert``, read on use."""

    table: Dataset
    convert: Callable[[dict[str, list[Any]]], list[Any]]
    source: str

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: Any) -> Any:
        return next(iter(self.select([range(len(self))[index]])))

    def __iter__(self) -> Iterator[Any]:
        try:
            for batch in self.table.with_format(None).iter(_AT_ONCE):  # decodes JSON in cells
                yield from self.convert(batch)
        except UnicodeDecodeError as error:
            raise DataError(
                f"'{self.source}' is not readable as UTF-8 text ({error.reason}). Save it as UTF-8."
            ) from None

    def select(self, numbers: Sequence[int]) -> _Rows:
        """Return some of them."""
        return _Rows(self.table.select(numbers), self.convert, self.source)


def read_examples(data: DataConfig, tokenizer: Any = None) -> Examples:
    """Read the examples that a data config names; one pass over files finds damage.

    Args:
        data: Source and columns.
        tokenizer: Makes texts of chats; None refuses them.

    Raises:
        DataError: If nothing is there, a column is missing, or there is no text in it.
    """
    refuse_missing_file(data.source)
    files = _files(data)
    kinds = sorted({BUILDERS.get(suffix(file), "other") for file in files})
    if kinds == ["other"]:
        raise DataError(f"The ending of '{data.source}' names no format. Known are {_ENDINGS}.")
    if len(kinds) > 1:
        raise DataError(f"'{data.source}' mixes {' and '.join(kinds)} files: keep one kind.")
    if kinds == ["text"]:
        examples = Examples(TextFiles(tuple(files)), None, rows_are_documents=False)
        blank = not sum(bool(text.strip()) for text in examples.strings())  # reads to the end
    else:
        table = _table(files, kinds[0] if kinds else None, data)
        columns = text_columns(table, data, named=kinds != ["csv"])
        table = without_nulls(table, columns, data)

        chats = {column for column in columns if holds_chats(table, column)}
        beside = [name for name in BESIDE if chats and name in table.column_names]
        of_texts = table.select_columns([*dict.fromkeys([*columns, *beside])])

        def of_column(batch: dict[str, list[Any]], column: str) -> list[str]:
            if column not in chats:
                return [
                    " ".join(w or "" for w in one) if isinstance(one, list) else one
                    for one in batch[column]
                ]
            asks = data.pairs and column == columns[0]  # the prompt of a reference
            return [
                chat_text(chat, tokenizer, data.source, asks) for chat in chats_of(batch, column)
            ]

        def places(batch: dict[str, list[Any]]) -> list[Any]:
            if len(columns) != 1 or not chats:
                raise DataError(
                    f"loss=answers is of chats, and '{data.source}' holds none: give rows of "
                    "messages with role and content."
                )
            all_of = chats_of(batch, columns[0])
            return [answer_places(chat, tokenizer, data.source) for chat in all_of]

        def texts(batch: dict[str, list[Any]]) -> list[Any]:
            return list(zip(*(of_column(batch, c) for c in columns), strict=True))

        labels: _Rows | None = None
        if data.loss is Loss.ANSWERS:
            labels = _Rows(of_texts, places, data.source)
        elif (column := data.label_column) is not None:
            labels = _Rows(table.select_columns([column]), label_texts(table, column), data.source)
        rows = _Rows(of_texts, texts, data.source)
        examples = Examples(rows, labels, rows_are_documents=True)
        blank = not any(map(str.strip, examples.strings()))
    if blank:
        raise DataError(f"'{data.source}' holds no text. Give a file with text in it.")
    return examples


def digest_of_data(data: DataConfig) -> str:
    """Return the digest of local files; a data set of the hub is known by name and split.

    Raises:
        DataError: If a folder has no file of text, or one is not readable.
    """
    place = Path(data.source)
    if not place.exists():
        return f"hub:{data.source}:{data.split}"
    folder = place if place.is_dir() else place.parent
    inside = visible(place)
    of_text = place.is_file() or any(suffix(file) in BUILDERS for file in inside)
    files = _files(data) if of_text else inside  # images
    try:
        return digest_of(hashes_of(folder, (str(f.relative_to(folder)) for f in files)))
    except OSError as error:
        raise DataError(f"'{data.source}' is not readable ({error}).") from None


def _files(data: DataConfig) -> list[Path]:
    path = Path(data.source)
    if path.is_file():
        return [path]
    if not path.is_dir():
        return []
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        raise DataError(
            f"'{path}' is the folder of a model, not text. Give a file of text or of a table, or "
            "a folder of such files."
        )
    if (splits := path / "dataset_dict.json").is_file():  # of datasets' save_to_disk
        names = json.loads(splits.read_text(encoding="utf-8"))["splits"]
        if data.split not in names:
            hint = did_you_mean(data.split, names)
            raise DataError(f"'{path}' has no split {data.split}.{hint} It has {', '.join(names)}.")
        path /= data.split
    saved = (path / "state.json").is_file()  # beside it, datasets keeps caches
    files = [
        file
        for file in visible(path, "data-*.arrow" if saved else "*")
        if suffix(file) in BUILDERS and file.name != "dataset_infos.json"
    ]
    if any(BUILDERS[suffix(file)] != "text" for file in files):  # Markdown is about the data
        files = [file for file in files if suffix(file) != ".md"]
    if any(suffix(file) != ".md" for file in files):
        files = [file for file in files if file.name != "README.md"]
    files = of_split(path, files, data)
    if not files:
        raise DataError(f"The folder '{path}' has no file with one of the endings {_ENDINGS}.")
    return files


def of_split(folder: Path, files: list[Path], data: DataConfig) -> list[Path]:
    """Return the files of the split; all of them where names tell no two splits.

    Raises:
        DataError: If there are others only.
    """
    splits = splits_of(folder, files)
    if splits and data.split not in splits:
        raise DataError(
            f"'{folder}' has files of the splits {', '.join(splits)}, and none of {data.split}: "
            f"give one, as in {folder}@{next(iter(splits))}."
        )
    return splits.get(data.split, files)


def _table(files: list[Path], builder: str | None, data: DataConfig) -> Dataset:
    try:
        return of_the_hub(data) if builder is None else of_files(files, builder)
    except (DataError, MemoryError):
        raise
    except Exception as error:  # builders raise whatever their parser raises
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        lines = filter(str.strip, str(cause).splitlines())
        reason = next(lines, type(cause).__name__)
        if isinstance(cause, StopIteration):
            reason = "it has no rows"
        raise DataError(f"datasets could not read '{data.source}': {reason}") from None


def of_files(files: list[Path], builder: str) -> Dataset:
    """Return the rows of files, in a temporary file that has lost its name.

    The cache of datasets is not used: it misses changes that keep a file's name and time.
    """
    if builder == "csv":
        return of_tables(files)
    with tempfile.TemporaryDirectory(prefix="headprune-") as folder:
        plain = [_unpacked(file, Path(folder) / f"{i}-{file.stem}") for i, file in enumerate(files)]
        if builder == "json":
            plain = [json_lines(file, Path(folder) / f"{i}.jsonl") for i, file in enumerate(plain)]
            for file in plain:
                _refuse_nulls(file)
        verbosity = datasets.logging.get_verbosity()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the error says it all
        try:
            table = datasets.load_dataset(
                builder,
                data_files=[glob.escape(str(file)) for file in plain],  # datasets expands patterns
                split="train",
                cache_dir=str(Path(folder) / "cache"),
            )
            views = [n for n, f in table.features.items() if f == datasets.Value("string_view")]
            for name in views:  # of Polars
                table = table.cast_column(name, datasets.Value("string"))
            return with_dates(table, plain) if builder == "json" else table
        finally:
            datasets.logging.set_verbosity(verbosity)


def _unpacked(file: Path, target: Path) -> Path:
    if file.suffix != ".gz":
        return file
    with target.open("wb") as stream:
        stream.writelines(byte_pieces(file))
    return target


def _refuse_nulls(file: Path) -> None:
    """Refuse JSON with a null row, as jq writes it: pyarrow may crash."""
    with file.open("rb") as stream:
        lines = iter(lambda: stream.readline(_PIECE), b"")
        rows = filter(None, (line.removeprefix(codecs.BOM_UTF8).strip() for line in lines))
        for row in rows:
            if row == b"null" or row.startswith(b"null "):
                raise DataError(f"'{file}' has a row that is null. Leave it out.")


def of_the_hub(data: DataConfig) -> Dataset:
    """Return the rows of a data set of the hub.

    Raises:
        DataError: If there is none of that name, and the hub cannot be asked.
    """
    path, _, name = data.source.partition(":")
    try:
        with hub.asked_once(path):
            return datasets.load_dataset(path, name or None, split=data.split)
    except MemoryError:
        raise
    except Exception:  # each version of the client of datasets has its own kinds
        if not hub.may_be_id(path) or (why_not := hub.why_not()) is None:
            raise
        raise DataError(
            f"'{data.source}' is no file, folder or cached data set of the hub ({why_not})."
        ) from None
