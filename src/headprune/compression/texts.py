"""The text of a compression: several texts in three parts, mixed.

Samples are drawn from all over the mixture: equal parts of the texts, as far as each reaches.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice, repeat, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any

from headprune.config import DataConfig
from headprune.data.read import Examples, read_examples
from headprune.data.sentences import sentences
from headprune.data.text import HELD_OUT, SHIPPED, evenly, split
from headprune.errors import DataError

CHARACTERS = 6  # of a token, at most in the mean of a text: more text than needed does no harm
_SPREAD = 16  # times the text of the fit, at most
_BLOCK = 8_192  # characters of a plain text that stay together, at most
_BLOCKS = 4 * HELD_OUT  # of a plain text, at least
_PIECES = 128  # of all files, of 256 KiB each: no more of them is read

Row = tuple[tuple[str, ...], str | None]


@dataclass(frozen=True)
class Documents:
    """Documents of one text.

    Attributes:
        name: Name of the text.
        rows: Documents, or blocks of a plain text, with a label each if they have one.
        plain: The rows make one running text.
    """

    name: str
    rows: tuple[Row, ...]
    plain: bool

    @property
    def size(self) -> int:
        """Characters."""
        return sum(len(part) for texts, _ in self.rows for part in texts)

    def examples(self) -> Examples:
        """As examples."""
        if self.plain:
            whole = "".join(texts[0] for texts, _ in self.rows)
            return Examples([(whole,)], None, rows_are_documents=False)
        labels = [label for _, label in self.rows if label is not None]
        return Examples([texts for texts, _ in self.rows], labels or None, rows_are_documents=True)

    def by_sentence(self) -> Documents:
        """Return a plain text as rows of a sentence each; other texts as they are."""
        if not self.plain:
            return self
        rows = tuple(((one,), None) for one in sentences(texts[0] for texts, _ in self.rows))
        return Documents(self.name, rows, plain=False)

    def select(self, numbers: Iterable[int]) -> Documents:
        """Return some of the rows."""
        return replace(self, rows=tuple(self.rows[number] for number in numbers))

    def spread(self, characters: int) -> Documents:
        """Return rows from all over it, evenly, with about ``characters`` characters together."""
        count = min(len(self.rows), math.ceil(characters * len(self.rows) / max(self.size, 1)))
        return self.select(evenly(len(self.rows), count))


def shipped() -> dict[str, DataConfig]:
    """Return the texts that come with headprune, by name (see README.md beside them)."""
    files = sorted(SHIPPED.glob("*.txt.gz"))
    return {file.name.removesuffix(".txt.gz"): DataConfig(source=str(file)) for file in files}


@dataclass(frozen=True)
class Parts:
    """Three parts of the same texts, without a common document or block; see ``split``."""

    fit: tuple[Documents, ...]
    choose: tuple[Documents, ...]
    report: tuple[Documents, ...]

    def held_out_as_one(self, tokens: int) -> Parts:
        """Return the parts, equal shares of all held-out texts as one, which is longer."""
        parts = []
        for part in (self.choose, self.report):
            plain, some = all(text.plain for text in part), mixed(part, tokens)
            between: tuple[Row, ...] = ((("\n\n",), None),) * plain
            rows = tuple(row for text in some for row in (*text.rows, *between))
            parts.append(Documents("all", rows, plain))
        return Parts(self.fit, (parts[0],), (parts[1],))

    def by_sentence(self) -> Parts:
        """Return the parts with a row for every sentence of a plain text."""
        parts = (self.fit, self.choose, self.report)
        return Parts(*(tuple(text.by_sentence() for text in part) for part in parts))


def read(sources: Mapping[str, DataConfig], tokenizer: Any = None) -> Parts:
    """Read texts, and hold out an eighth of each.

    Raises:
        DataError: If a text cannot be read, or only some are pairs or labelled.
    """
    texts = [_documents(name, data, tokenizer) for name, data in sources.items()]
    if len({(len(r[0]), r[1] is None) for text in texts for r in text.rows}) > 1:
        raise DataError(
            "The texts of --data cannot be mixed: some are pairs, or have labels, and others are "
            "not or have none. Give such texts in runs of their own."
        )
    parts = []
    for text in texts:
        total = len(text.rows)
        held_out = max(2, total // HELD_OUT) if total >= HELD_OUT else 0
        parts.append([text.select(numbers) for numbers in split(total, total - held_out)])
    return Parts(*zip(*parts, strict=True))


def mixed(texts: Sequence[Documents], tokens: int, trained: int = 0) -> tuple[Documents, ...]:
    """Return equal parts of texts; longer ones make up for what one lacks.

    Args:
        texts: The texts.
        tokens: Tokens of the samples of them.
        trained: Tokens of a training on them.
    """
    by_size = sorted(range(len(texts)), key=lambda at: texts[at].size)
    needed, equal = tokens * CHARACTERS, len(texts) * texts[by_size[0]].size
    drawn_from = max(needed, min(equal, _SPREAD * needed))
    left, parts = max(drawn_from, trained * CHARACTERS), dict[int, Documents]()
    for done, at in enumerate(by_size):
        share = left // (len(texts) - done)
        parts[at] = texts[at].spread(share)
        left -= min(share, parts[at].size)
    return tuple(parts[at] for at in range(len(texts)))


def write(texts: Sequence[Documents], folder: Path) -> DataConfig:
    """Write texts to a file in a folder, and return how to read it."""
    folder.mkdir(parents=True)
    if all(text.plain for text in texts):
        path = folder / "text.txt"
        running = ("".join(row[0] for row, _ in text.rows) for text in texts)
        path.write_text("\n\n".join(running), encoding="utf-8")
        return DataConfig(source=str(path))
    path, pairs, labels = folder / "text.jsonl", False, False
    with path.open("w", encoding="utf-8") as file:
        for parts, label in (row for text in texts for row in text.rows):
            pairs, labels = len(parts) == 2, label is not None
            row = dict(zip(("text", "second"), parts, strict=False))
            file.write(json.dumps(row | ({"label": label} if labels else {})) + "\n")
    return DataConfig(
        source=str(path),
        text_column="text,second" if pairs else "text",
        label_column="label" if labels else None,
    )


def _documents(name: str, data: DataConfig, tokenizer: Any) -> Documents:
    examples = read_examples(data, tokenizer)
    whole_rows = examples.labels is not None or examples.width > 1  # not cut into blocks
    if examples.rows_are_documents and (whole_rows or len(examples.texts) >= HELD_OUT):
        labels: Iterable[str | None] = examples.labels or repeat(None, len(examples.texts))
        return Documents(name, tuple(zip(examples.texts, labels, strict=True)), plain=False)
    rounds = zip_longest(*examples.spread(_PIECES).documents(), fillvalue="")
    numbered = filter(itemgetter(1), chain.from_iterable(map(enumerate, rounds)))
    pieces = sorted(islice(numbered, _PIECES), key=itemgetter(0))
    files = groupby(pieces, key=itemgetter(0))
    whole = "\n\n".join("".join(piece for _, piece in each) for _, each in files)
    return Documents(name, _blocks(whole, min(_BLOCK, max(2, len(whole) // _BLOCKS))), plain=True)


def _blocks(text: str, size: int) -> tuple[Row, ...]:
    rows, start = [], 0
    while start < len(text):
        stop = start + size
        stop = len(text) if stop >= len(text) else _break(text, stop, stop - size // 2)
        rows.append(((text[start:stop],), None))
        start = stop
    return tuple(rows)


def _break(text: str, at: int, first: int) -> int:
    """Return the last end of a line, else of a word, before a place; else the place itself."""
    for sign in ("\n", " "):
        found = text.rfind(sign, first, at)
        if found >= 0:
            return found + 1
    return at
