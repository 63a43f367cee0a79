"""Plain text for models that read single sentences, such as encoders of sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain

from headprune.data.read import Examples
from headprune.model.loading import CLASSIFIERS, WITHOUT_LOSS

# tasks of models that read no running text
OF_SENTENCES = (*CLASSIFIERS, "token-classification", "features", *WITHOUT_LOSS)
_END = re.compile(r"(?<=[.!?।])\s+|(?<=[。！？])|\n\s*\n")
_SHORTEST, _LONGEST = 20, 1 << 16  # characters of a sentence
_MEAN = 1_000  # mean characters of a sentence, at most, in a text of sentences
_MOST = 1 << 25  # characters of all sentences: no more of a text is read


def sentences(pieces: Iterable[str]) -> Iterator[str]:
    """Yield the sentences of a text in pieces, each as one line, without short ones."""
    held = ""
    for piece in pieces:
        *whole, held = _END.split(held + piece)
        if len(held) > _LONGEST:
            whole, held = [*whole, held], ""
        yield from _long_enough(whole)
    yield from _long_enough([held])


def by_sentence(examples: Examples) -> Examples:
    """Return plain text as an example per sentence; tables and other text stay as they are.

    At most 32 MiB are read.
    """
    if examples.rows_are_documents:
        return examples
    files = map(sentences, examples.documents())
    rows = [(sentence,) for sentence in _first(chain.from_iterable(files))]
    if not rows or sum(len(sentence) for (sentence,) in rows) > _MEAN * len(rows):
        return examples
    return Examples(rows, None, rows_are_documents=True)


def _first(lines: Iterable[str]) -> Iterator[str]:
    size = 0
    for sentence in lines:
        yield sentence
        size += len(sentence)
        if size > _MOST:
            return


def _long_enough(parts: Iterable[str]) -> Iterator[str]:
    lines = (" ".join(sentence.split()) for sentence in parts)
    return (line for line in lines if len(line) >= _SHORTEST)
