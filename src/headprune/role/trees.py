"""Sentences with dependency trees, from CoNLL-U files of Universal Dependencies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool
from torch import Tensor

from headprune.data.files import text_pieces
from headprune.errors import DataError

Span = tuple[int, int]


@dataclass(frozen=True)
class Tree:
    """A sentence.

    Attributes:
        spans: Start and end of each word in the text.
        heads: Place of each word's head; -1 for root and punctuation.
        relations: Without subtypes.
    """

    text: str
    spans: tuple[Span, ...]
    heads: tuple[int, ...]
    relations: tuple[str, ...]

    def belonging(self, offsets: Sequence[Span]) -> Bool[Tensor, "tokens words"]:
        """Return the tokens that overlap each word, from their offsets in the text."""
        rows = [(end - len(self.text[start:end].lstrip()), end) for start, end in offsets]
        tokens, spans = torch.tensor(rows)[:, None], torch.tensor(self.spans)
        latest = torch.maximum(tokens[..., 0], spans[:, 0])
        return latest < torch.minimum(tokens[..., 1], spans[:, 1])


def read_trees(source: str) -> list[Tree]:
    """Return the sentences of a file; raise DataError where there is none."""
    path = Path(source)
    if not path.is_file():
        raise DataError(f"--trees {source}: there is no such file. Give a CoNLL-U file (also .gz).")
    blocks = re.split(r"\n\s*\n", "".join(text_pieces(path)))
    trees = [tree for block in blocks if (tree := _tree(source, block)) is not None]
    if not trees:
        raise _no_treebank(source, "it has no sentence with '# text = ' and its words below")
    return trees


def _no_treebank(source: str, why: str) -> DataError:
    return DataError(
        f"--trees {source} is no CoNLL-U file: {why}. Give a treebank of Universal Dependencies."
    )


def _tree(source: str, block: str) -> Tree | None:
    text = ""
    words: list[tuple[str, int, str]] = []  # form, place of its head, relation
    joined: dict[int, tuple[int, str]] = {}  # by first word: last word and form, as of "don't"
    for row in filter(str.strip, block.split("\n")):
        if row.startswith("#"):
            text = row.partition("=")[2].strip() if row.startswith("# text =") else text
            continue
        cells = row.split("\t")
        if len(cells) != 10:
            raise _no_treebank(source, f"{row[:40]!r} has {len(cells)} columns, not 10")
        number, form, head, relation = *cells[:2], cells[6], cells[7].partition(":")[0]
        if "-" in number:
            first, _, last = number.partition("-")
            joined[_number(first)] = _number(last), form
        elif "." not in number:  # an empty node is no word of the text
            place = -1 if relation in ("root", "punct") else max(_number(head), 0) - 1
            words.append((form, place, relation))
    spans = _spans(text, [form for form, _, _ in words], joined)
    if not spans or any(place >= len(words) for _, place, _ in words):
        return None
    _, heads, relations = zip(*words, strict=True)
    return Tree(text, tuple(spans), heads, relations)


def _number(cell: str) -> int:
    return int(cell) if re.fullmatch("[0-9]{1,9}", cell) else -1


def _spans(text: str, forms: Sequence[str], joined: dict[int, tuple[int, str]]) -> list[Span]:
    """Return the places of words, from left to right; none if one is missing."""
    spans: list[Span] = []
    end = 0
    while len(spans) < len(forms):
        number = len(spans) + 1
        last, form = joined.get(number, (number, forms[number - 1]))
        start = text.find(form, end)
        if start < 0 or not number <= last <= len(forms) or not form:
            return []
        end = start + len(form)
        inside = _spans(form, forms[number - 1 : last], {}) if last > number else []
        spans += [(start + a, start + b) for a, b in inside] or [(start, end)] * (last - number + 1)
    return spans
