"""Sentences with their dependency trees, from CoNLL-U files of Universal Dependencies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headprune.data.read import text_pieces
from headprune.errors import DataError

Span = tuple[int, int]
_COLUMNS = 10
_DIGITS = 9  # of the number of a word; Python refuses to read some thousands
_NO_RELATION = ("root", "punct")


@dataclass(frozen=True)
class Tree:
    """A sentence.

    Attributes:
        text: As it was written.
        spans: Where each word begins and ends in it.
        heads: Which word each depends on; -1 for none, or by a relation that is none of syntax.
        relations: How, without subtypes.
    """

    text: str
    spans: tuple[Span, ...]
    heads: tuple[int, ...]
    relations: tuple[str, ...]


def read_trees(source: str) -> list[Tree]:
    """The sentences of a file, but for those whose words are not those of their text.

    Raises:
        DataError: If the file is missing or damaged, or no such file.
    """
    path = Path(source)
    if not path.is_file():
        what = "it is no file" if path.exists() else "there is no such file"
        raise DataError(f"--trees {source}: {what}. Give a CoNLL-U file (also .gz).")
    lines = "".join(text_pieces(path)).split("\n")
    trees = [_tree(source, rows) for rows in _sentences(lines)]
    found = [tree for tree in trees if tree is not None]
    if not found:
        raise _no_tree_file(source, "it has no sentence with '# text = ' and its words below")
    return found


def _no_tree_file(source: str, why: str) -> DataError:
    return DataError(
        f"--trees {source} is no CoNLL-U file: {why}. Give a treebank of Universal Dependencies."
    )


def _sentences(lines: Sequence[str]) -> Iterator[list[tuple[int, str]]]:
    """Numbered lines between empty ones."""
    rows: list[tuple[int, str]] = []
    for number, line in enumerate([*lines, ""], 1):
        if line.strip():
            rows.append((number, line))
        elif rows:
            yield rows
            rows = []


def _tree(source: str, rows: Sequence[tuple[int, str]]) -> Tree | None:
    text: str | None = None
    words: list[tuple[str, str, str]] = []  # form, head, relation
    ranges: dict[int, tuple[int, str]] = {}  # of the first word: the last one, and their form
    for number, row in rows:
        if row.startswith("#"):
            text = row.partition("=")[2].strip() if row.startswith("# text =") else text
            continue
        cells = row.split("\t")
        if len(cells) != _COLUMNS:
            raise _no_tree_file(
                source, f"line {number} has {len(cells)} columns between tabs, not {_COLUMNS}"
            )
        if "-" in cells[0]:
            first, last = cells[0].split("-", 1)
            if _is_number(first) and _is_number(last):
                ranges[int(first)] = int(last), cells[1]
        elif "." not in cells[0]:  # no word of the text: an empty node
            words.append((cells[1], cells[6], cells[7].partition(":")[0]))
    spans = _spans(text, [form for form, _, _ in words], ranges) if text else None
    if text is None or not spans:
        return None
    heads = []
    for _, head, relation in words:
        place = int(head) - 1 if _is_number(head) and relation not in _NO_RELATION else -1
        if place >= len(words):
            return None
        heads.append(place)
    return Tree(text, tuple(spans), tuple(heads), tuple(relation for _, _, relation in words))


def _is_number(cell: str) -> bool:
    return cell.isdecimal() and len(cell) <= _DIGITS


def _spans(
    text: str, forms: Sequence[str], ranges: dict[int, tuple[int, str]]
) -> list[Span] | None:
    """Where words stand, found from left to right; None if one does not.

    Words that are written as one share its place, where their own forms are not in it.
    """
    spans: list[Span] = []
    at = 0
    while len(spans) < len(forms):
        number = len(spans) + 1
        last, form = ranges.get(number, (number, forms[number - 1]))
        start = text.find(form, at)
        if start < 0 or not number <= last <= len(forms) or not form:
            return None
        end = start + len(form)
        inside = _spans(form, forms[number - 1 : last], {}) if last > number else None
        if inside is None:
            spans += [(start, end)] * (last - number + 1)
        else:
            spans += [(start + a, start + b) for a, b in inside]
        at = end
    return spans


def belonging(tree: Tree, offsets: Sequence[Span]) -> NDArray[np.bool_]:
    """Which tokens belong to which words, shape (tokens, words): their places overlap.

    Args:
        tree: The sentence.
        offsets: Where every token begins and ends in its text. Some tokenizers count the space
            before a word to it.
    """
    found = np.zeros((len(offsets), len(tree.spans)), dtype=bool)
    for token, (start, end) in enumerate(offsets):
        start += len(tree.text[start:end]) - len(tree.text[start:end].lstrip())
        for word, (begins, ends) in enumerate(tree.spans):
            found[token, word] = max(start, begins) < min(end, ends)
    return found
