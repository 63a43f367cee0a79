"""Passages of text, and their last words as prompts.

A line that is blank or a heading (it begins with # or =) separates; the text between is cut into
passages of whole sentences. A passage ends with the first sentence that brings it to 50 words
(some 64 tokens) and ends with a word of four letters or more; one of more than 150 words is left
out. Its last word is the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile, zip_longest
from typing import Any

import numpy as np

from headprune.data.read import Examples
from headprune.data.tokens import around
from headprune.model.answers import Prompt

_MOST_TEXT = 10**7  # characters that passages are cut from
_WORDS = range(50, 151)  # of a passage
_LETTERS = 4  # of a last word, at least
_STOPS = ".!?"
_OPENING, _CLOSING = "\"'`“‘«([", "\"'”’»)]"


@dataclass(frozen=True)
class Passage:
    """Sentences without their last word.

    Attributes:
        context: The sentences.
        word: The word.
        seen: Whether it stands in the context, in any case.
        sentence: The last sentence of the context.
    """

    context: str
    word: str
    seen: bool
    sentence: str = ""

    @property
    def answer_in_context(self) -> bool:
        """True if the word stands in the context, but not in its own sentence."""
        return self.seen and not _stands_in(self.sentence, self.word)


@dataclass(frozen=True)
class PassageWord:
    """A last word that stands earlier in its passage: after the passage, and after its sentence."""

    row: Prompt
    alone: Prompt


def prompt_of(tokenizer: Any, context: str, answer: str, before: Sequence[int] = ()) -> Prompt:
    """Return a context and, after a space, its answer, in tokens; ``before`` precede them."""
    texts = [context, f"{context} {answer}"]
    alone, ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    if ids[: len(before)] == [*before]:  # a chat begins so itself
        before = ()
    same = takewhile(lambda pair: pair[0] == pair[1], zip(alone, ids, strict=False))
    return Prompt([*before, *ids], len(before) + sum(1 for _ in same))


def passage_words(
    examples: Examples, count: int, tokenizer: Any, most: int | None, inside: bool = False
) -> tuple[PassageWord, ...]:
    """Return prompts whose answer stands in the passage, but not in its own sentence.

    Args:
        examples: Any text.
        count: How many passages at most, from all over the text.
        tokenizer: The model's tokenizer.
        most: Tokens of a prompt at most; longer ones are left out.
        inside: Passages also overlap, cross paragraphs and end inside their last sentence: some
            fifty times as many.
    """
    given = passages(lines_of(examples), count, lambda one: one.answer_in_context, inside)
    before = around(tokenizer).before
    words = (
        PassageWord(
            *(prompt_of(tokenizer, text, one.word, before) for text in (one.context, one.sentence))
        )
        for one in given
    )
    return tuple(
        word
        for word in words
        if word.row.start and word.alone.start and (most is None or len(word.row.ids) <= most)
    )


def passages(
    texts: Iterable[str],
    count: int,
    among: Callable[[Passage], bool] = lambda passage: True,
    inside: bool = False,
) -> tuple[Passage, ...]:
    """Cut text, in rows or lines, into passages; return ``count`` of some at most, evenly."""
    blocks = [" ".join(_blocks(texts))] if inside else _blocks(texts)
    cut = (passage for block in blocks for passage in _cut(block, inside))
    whole = [passage for passage in cut if among(passage)]
    if len(whole) > count:
        whole = [whole[place] for place in np.linspace(0, len(whole) - 1, count).astype(int)]
    return tuple(whole)


def lines_of(examples: Examples) -> Iterator[str]:
    """Yield rows of data; of text files, which are apart, the lines."""
    for document in examples.documents():
        rest = ""
        for piece in document:
            *lines, rest = (rest + piece).split("\n")
            yield from lines
        yield rest
        if not examples.rows_are_documents:
            yield ""


def _blocks(texts: Iterable[str]) -> Iterator[str]:
    """Yield the text between lines that separate, each on one line."""
    lines: list[str] = []
    for line in _lines(texts):
        if not line or line.startswith(("#", "=")):
            yield " ".join(lines)
            lines = []
        else:
            lines.append(line)
    yield " ".join(lines)


def _lines(texts: Iterable[str]) -> Iterator[str]:
    left = _MOST_TEXT
    for text in texts:
        for line in text[:left].splitlines() or [""]:
            yield line.strip()
        left -= len(text)
        if left <= 0:
            return


def _cut(block: str, inside: bool) -> Iterator[Passage]:
    sentences: list[list[str]] = []
    for sentence in _sentences(block):
        before = list(chain.from_iterable(sentences))
        sentences.append(sentence)
        words, passage = before + sentence, None
        if len(words) >= _WORDS.start:
            ends = range(len(before) + 1, len(words) + 1) if inside else [len(words)]
            for end in ends:
                passage = _without_end(words[:end], len(before))
                if passage is not None and end in _WORDS:
                    yield passage
        if inside:  # passages overlap
            while sum(map(len, sentences[1:])) >= _WORDS.start:
                del sentences[0]
        elif passage is not None or len(words) >= _WORDS.stop:
            sentences = []


def _sentences(block: str) -> Iterator[list[str]]:
    """Yield the words of every sentence: up to a full stop that no small letter follows."""
    sentence: list[str] = []
    words = block.split()
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        sentence.append(word)
        stops = word.rstrip(_CLOSING).endswith(tuple(_STOPS))
        if stops and not following.lstrip(_OPENING)[:1].islower():
            yield sentence
            sentence = []


def _without_end(words: Sequence[str], first: int) -> Passage | None:
    """Return words without the last one; their last sentence begins with word ``first``."""
    text = " ".join(words)
    context, _, word = text.rstrip(f"{_STOPS},;:{_CLOSING} ").rpartition(" ")
    if not (word.isalpha() and len(word) >= _LETTERS):
        return None
    before = " ".join(words[:first])
    return Passage(context, word, _stands_in(context, word), context[len(before) :].strip())


def _stands_in(text: str, word: str) -> bool:
    text, word = text.lower(), word.lower()
    return word in text and word in re.findall(r"[^\W\d_]+", text)  # most end at the first


def last_words(given: Iterable[Passage], tokenizer: Any, most: int | None) -> tuple[Prompt, ...]:
    """Return passages as prompts, without those of more than ``most`` tokens."""
    before = around(tokenizer).before
    words = (prompt_of(tokenizer, one.context, one.word, before) for one in given)
    return tuple(word for word in words if word.start and (most is None or len(word.ids) <= most))
