"""The text of a compression: parted by position into learning, choosing and reporting.

An eighth of the documents of every text, or of its blocks, is held out, evenly over it. Every other
one of these chooses, the rest reports. The texts are mixed in equal parts, as far as each reaches,
and where all reach far, much more of them than is learnt from: samples are drawn from all over the
mixture.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat
from pathlib import Path

from headprune.config import DataConfig
from headprune.data.read import Examples, read_examples
from headprune.data.sentences import sentences
from headprune.data.text import evenly, split
from headprune.errors import DataError

HELD_OUT = 8  # one of so many documents or blocks
CHARACTERS = 6  # of a token, at most in the mean of a text: more text than needed does no harm
_SPREAD = 16  # times as much text as is learnt from, at most
_BLOCK = 8_192  # characters of a plain text that stay together, at most
_BLOCKS = 4 * HELD_OUT  # of a plain text, at least
_PIECES = 128  # of a file, of 256 KiB each: no more of it is read
_MIXED = Path(__file__).parents[1] / "data" / "mixed"

Row = tuple[tuple[str, ...], str | None]


@dataclass(frozen=True)
class Text:
    """A text of one domain.

    Attributes:
        name: Its name.
        rows: Texts with a label each, if they have one: documents, or blocks of a plain text.
        plain: Whether the rows make one running text.
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

    def by_sentence(self) -> Text:
        """A plain text as rows of a sentence each; other texts as they are."""
        if not self.plain:
            return self
        found = sentences(texts[0] for texts, _ in self.rows)
        return Text(self.name, tuple(((one,), None) for one in found), plain=False)

    def halves(self, odd: bool) -> tuple[Text, Text]:
        """Return every other row and the rest; ``odd`` swaps the two."""
        first, second = (replace(self, rows=self.rows[start::2]) for start in (odd, not odd))
        return first, second

    def spread(self, characters: int) -> Text:
        """Rows from all over it, evenly, with about so many characters together."""
        count = min(len(self.rows), math.ceil(characters * len(self.rows) / max(self.size, 1)))
        return replace(self, rows=tuple(self.rows[i] for i in evenly(len(self.rows), count)))


def shipped() -> dict[str, DataConfig]:
    """The texts that come with headprune, by name (see SOURCE.md beside them)."""
    files = sorted(_MIXED.glob("*.txt.gz"))
    return {file.name.removesuffix(".txt.gz"): DataConfig(source=str(file)) for file in files}


@dataclass(frozen=True)
class Parts:
    """Three parts of the same texts, which have no document or block in common.

    Attributes:
        learning: For scores, refits, merges and healing.
        choosing: For the choice of a candidate.
        reporting: For the numbers of the chosen one.
    """

    learning: tuple[Text, ...]
    choosing: tuple[Text, ...]
    reporting: tuple[Text, ...]

    def by_sentence(self) -> Parts:
        """Return the parts with a row for every sentence of a plain text."""
        parts = (self.learning, self.choosing, self.reporting)
        return Parts(*(tuple(text.by_sentence() for text in part) for part in parts))


def read(sources: Mapping[str, DataConfig]) -> Parts:
    """Read texts, and part them.

    Raises:
        DataError: If a text cannot be read, or one has pairs or labels and another has none.
    """
    parts = [_parts(name, data) for name, data in sources.items()]
    shapes = {(len(r[0]), r[1] is None) for learning, _ in parts for r in learning.rows}
    if len(shapes) > 1:
        raise DataError(
            "The texts of --data cannot be mixed: some are pairs, or have labels, and others are "
            "and have none. Give such texts in runs of their own."
        )
    held_out = [held.halves(odd=bool(at % 2)) for at, (_, held) in enumerate(parts)]
    return Parts(
        tuple(learning for learning, _ in parts),
        tuple(choosing for choosing, _ in held_out),
        tuple(reporting for _, reporting in held_out),
    )


def mixed(texts: Sequence[Text], tokens: int, trained: int = 0) -> tuple[Text, ...]:
    """Equal parts of texts; what one lacks the others make up for.

    Args:
        texts: The texts.
        tokens: How many samples of them have.
        trained: How many are trained on, all that are written.
    """
    by_size = sorted(range(len(texts)), key=lambda at: texts[at].size)
    needed, equal = tokens * CHARACTERS, len(texts) * texts[by_size[0]].size
    drawn_from = max(needed, min(equal, _SPREAD * needed))
    left, parts = max(drawn_from, trained * CHARACTERS), dict[int, Text]()
    for done, at in enumerate(by_size):
        share = left // (len(texts) - done)
        parts[at] = texts[at].spread(share)
        left -= min(share, parts[at].size)
    return tuple(parts[at] for at in range(len(texts)))


def write(texts: Sequence[Text], folder: Path) -> DataConfig:
    """Writes texts to a file in a folder, and says how it is read."""
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


def _parts(name: str, data: DataConfig) -> tuple[Text, Text]:
    examples = read_examples(data)
    whole_rows = examples.labels is not None or examples.width > 1  # such are not cut
    if examples.rows_are_documents and (whole_rows or len(examples.texts) >= HELD_OUT):
        labels: Iterable[str | None] = examples.labels or repeat(None, len(examples.texts))
        return _parted(name, tuple(zip(examples.texts, labels, strict=True)), plain=False)
    between = "\n\n" if examples.rows_are_documents else ""  # of a few: others are in pieces
    whole = between.join(islice(examples.strings(), _PIECES))
    return _parted(name, _blocks(whole, min(_BLOCK, max(2, len(whole) // _BLOCKS))), plain=True)


def _parted(name: str, rows: tuple[Row, ...], plain: bool) -> tuple[Text, Text]:
    # one to choose on and one to report on, at least
    held_out = max(2, len(rows) // HELD_OUT) if len(rows) >= HELD_OUT else 0
    learnt, held = (
        Text(name, tuple(rows[number] for number in numbers), plain)
        for numbers in apart(len(rows), held_out)
    )
    return learnt, held


def _blocks(text: str, size: int) -> tuple[Row, ...]:
    found, start = [], 0
    while start < len(text):
        stop = start + size
        stop = len(text) if stop >= len(text) else _break(text, stop, stop - size // 2)
        found.append(((text[start:stop],), None))
        start = stop
    return tuple(found)


def _break(text: str, at: int, first: int) -> int:
    """The last end of a line, else of a word, before a place; the place itself where none is."""
    for sign in ("\n", " "):
        found = text.rfind(sign, first, at)
        if found >= 0:
            return found + 1
    return at
