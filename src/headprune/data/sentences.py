"""Plain text for models that read single sentences, such as encoders of sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain

from headprune.data.read import Examples
from headprune.model.loading import CLASSIFIERS, UNMEASURED

OF_SENTENCES = (*CLASSIFIERS, "features", *UNMEASURED)  # tasks of models that read no running text
_END = re.compile(r"(?<=[.!?।])\s+|(?<=[。！？])|\n\s*\n")
_SHORTEST, _LONGEST = 20, 1 << 16  # characters of a sentence
_MEAN = 1_000  # characters of a sentence, at most, in a text that is made of sentences
_MOST = 1 << 25  # characters of all sentences: no more of a text is read


def sentences(pieces: Iterable[str]) -> Iterator[str]:
    """The sentences of a text that comes in pieces, each as one line, and no short ones."""
    held = ""
    for piece in pieces:
        *whole, held = _END.split(held + piece)
        if len(held) > _LONGEST:
            whole, held = [*whole, held], ""
        yield from _long_enough(whole)
    yield from _long_enough([held])


def by_sentence(examples: Examples) -> Examples:
    """Plain text as an example per sentence; tables, and text without sentences, as they are.

    Of a text of more than 32 MiB the first are read.
    """
    if examples.rows_are_documents:
        return examples
    files = map(sentences, examples.documents())
    found = [(sentence,) for sentence in _first(chain.from_iterable(files))]
    if not found or sum(len(sentence) for (sentence,) in found) > _MEAN * len(found):
        return examples
    return Examples(found, None, rows_are_documents=True)


def _first(found: Iterable[str]) -> Iterator[str]:
    size = 0
    for sentence in found:
        yield sentence
        size += len(sentence)
        if size > _MOST:
            return


def _long_enough(found: Iterable[str]) -> Iterator[str]:
    lines = (" ".join(sentence.split()) for sentence in found)
    return (line for line in lines if len(line) >= _SHORTEST)
