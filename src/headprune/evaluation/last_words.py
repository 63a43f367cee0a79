"""Whether a causal language model predicts the last word of a passage, which all of it leads up to.

In the spirit of LAMBADA (Paperno et al. 2016, arXiv 1606.06031), from any text and without people:

- A line that is blank or a heading (it begins with # or =) separates; all other lines follow upon
  each other, so that a passage may span rows of a data set.
- What lies between is cut into passages of whole sentences, one after the other. A passage ends
  with the first sentence that brings it to 50 words (some 64 tokens) and ends with a word of four
  letters or more. One of more than 150 words (some 200 tokens) is left out.
- Of these, as many as are asked for are taken, spread evenly.

Everything before the last word is given. It is a hit if each of its tokens is the likeliest one,
given those before it; words that stand earlier in the passage are counted once more by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, zip_longest
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from headprune.data.read import Examples
from headprune.data.tokens import around
from headprune.evaluation.endings import Ending, ending_of, endings_predicted
from headprune.evaluation.metrics import Floats
from headprune.evaluation.quality import Progress
from headprune.model.batch import most_tokens

LAST_WORDS = ("last_word_hits", "seen_last_words", "seen_last_word_hits")

_MOST_TEXT = 10**7  # characters that passages are cut from
_WORDS = range(50, 151)  # of a passage
_LETTERS = 4  # of a last word, at least
_STOPS = ".!?"
_OPENING, _CLOSING = "\"'`“‘«([", "\"'”’»)]"


@dataclass(frozen=True)
class Passage:
    """Some sentences without their end.

    Attributes:
        context: All before the last word.
        word: The last word.
        seen: Whether the context has it as well, however it is capitalized.
    """

    context: str
    word: str
    seen: bool


def passages(texts: Iterable[str], count: int) -> tuple[Passage, ...]:
    """Cuts text into passages, and takes some of them, spread evenly.

    Args:
        texts: Rows or lines.
        count: How many are wanted; all, if there are fewer.
    """
    found = [one for block in _blocks(texts) for one in _cut(block)]
    if len(found) > count:
        found = [found[place] for place in np.linspace(0, len(found) - 1, count).astype(int)]
    return tuple(found)


def fitting(
    given: Sequence[Passage], tokenizer: Any, models: Sequence[PreTrainedModel]
) -> tuple[Passage, ...]:
    """The passages that the tokenizer and every model take, so that all read the same ones."""
    limits = [most_tokens(model.config, tokenizer) for model in models]
    most = min((limit for limit in limits if limit is not None), default=None)
    rows = _rows(given, tokenizer)
    fit = (row.start > 0 and (most is None or len(row.ids) <= most) for row in rows)
    return tuple(compress(given, fit))


def last_words(
    model: PreTrainedModel,
    tokenizer: Any,
    given: Sequence[Passage],
    batch_size: int = 4,
    progress: Progress = lambda done, total: None,
) -> dict[str, Floats]:
    """Predicts the last words of passages.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        given: The passages; those that are longer than model and tokenizer take are left out.
        batch_size: Passages per forward pass; no result depends on it.
        progress: Called with passages done and passages in all.

    Returns:
        Per passage, what the metrics of last words are made of; nothing where there is none.
    """
    given = fitting(given, tokenizer, [model])
    rows = _rows(given, tokenizer)
    hits = endings_predicted(model, rows, batch_size, progress)
    seen = np.array([float(passage.seen) for passage in given])
    found = dict(zip(LAST_WORDS, (hits, seen, hits * seen), strict=True))
    return dict(list(found.items())[: 3 if seen.any() else 1 if len(hits) else 0])


def rows_of(examples: Examples) -> Iterator[str]:
    """The rows of data as passages are cut from them; of text files, which are apart, the lines."""
    for document in examples.documents():
        rest = ""
        for piece in document:
            *lines, rest = (rest + piece).split("\n")
            yield from lines
        yield rest
        if not examples.rows_are_documents:
            yield ""


def _rows(given: Sequence[Passage], tokenizer: Any) -> list[Ending]:
    """Passages in tokens, which begin as the tokenizer begins a text."""
    before = around(tokenizer).before
    return [ending_of(tokenizer, one.context, one.word, before) for one in given]


def _blocks(texts: Iterable[str]) -> Iterator[str]:
    """What lies between lines that separate, each on one line."""
    lines: list[str] = []
    for line in _lines(texts):
        if not line or line.startswith(("#", "=")):
            yield " ".join(lines)
            lines = []
        else:
            lines.append(line)
    yield " ".join(lines)


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines of the first so many characters."""
    left = _MOST_TEXT
    for text in texts:
        for line in text[:left].splitlines() or [""]:
            yield line.strip()
        left -= len(text)
        if left <= 0:
            return


def _cut(block: str) -> Iterator[Passage]:
    """Passages of whole sentences, one after the other."""
    words: list[str] = []
    for sentence in _sentences(block):
        words += sentence
        found = _without_end(words) if len(words) >= _WORDS.start else None
        if found is not None and len(words) in _WORDS:
            yield found
        if found is not None or len(words) >= _WORDS.stop:
            words = []


def _sentences(block: str) -> Iterator[list[str]]:
    """The words of every sentence: up to a full stop before what is no small letter."""
    sentence: list[str] = []
    words = block.split()
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        sentence.append(word)
        stops = word.rstrip(_CLOSING).endswith(tuple(_STOPS))
        if stops and not following.lstrip(_OPENING)[:1].islower():
            yield sentence
            sentence = []


def _without_end(words: Sequence[str]) -> Passage | None:
    """A passage of whole sentences, if its last word is one that counts."""
    text = " ".join(words)
    context, _, word = text.rstrip(f"{_STOPS}{_CLOSING} ").rpartition(" ")
    if not (word.isalpha() and len(word) >= _LETTERS):
        return None
    earlier = re.findall(r"[^\W\d_]+", context.lower())
    return Passage(context, word, word.lower() in earlier)
