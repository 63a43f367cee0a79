"""Probes of a causal language model: prompts, and whether it answers them.

An answer is right if each of its tokens is the likeliest one, given those before it, which is what
greedy decoding would write. One pass over prompt and answer tells.

**Last words**, in the spirit of LAMBADA (Paperno et al. 2016, arXiv 1606.06031), from any text:
a line that is blank or a heading (it begins with # or =) separates; the text between is cut into
passages of whole sentences. A passage ends with the first sentence that brings it to 50 words
(some 64 tokens) and ends with a word of four letters or more; one of more than 150 words is left
out. Its last word is the answer; words that stand earlier in the passage also count apart.

**Passage words** are last words that only the passage tells: they stand in it, but not in their own
sentence, and the original predicts them after the passage, not after that sentence alone.

**Needles**: a sentence with a random number of five digits is put into text, at some depth. After
the text the sentence begins again; its number is the answer. Perplexity hardly weighs what comes
from far back: a cut may keep it and retrieve nothing beyond a few hundred tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from headprune.config import NEEDLE_DEPTHS, NEEDLE_LENGTHS, NeedleConfig
from headprune.data.read import Examples
from headprune.data.sequences import windows
from headprune.data.tokens import around
from headprune.errors import DataError
from headprune.evaluation.metrics import Floats
from headprune.evaluation.quality import Progress
from headprune.model.passes import logits_at

LAST_WORDS = ("last_word_hits", "seen_last_words", "seen_last_word_hits")
PASSAGE_WORDS = ("passage_word_hits",)
NEEDLES = ("needle_hits",)
FEWEST = 50  # passage words that a share of them rests on

_MOST_TEXT = 10**7  # characters that passages are cut from
_WORDS = range(50, 151)  # of a passage
_LETTERS = 4  # of a last word, at least
_STOPS = ".!?"
_OPENING, _CLOSING = "\"'`“‘«([", "\"'”’»)]"

_FACT = "\nThe secret number of the {key} is"
_KEYS = ("bridge", "castle", "engine", "forest", "garden", "island", "kitchen", "river", "village")
_LEAST_TEXT = 16  # tokens around a needle


@dataclass(frozen=True)
class Prompt:
    """Tokens of a context and its answer, which begins at ``start``."""

    ids: list[int]
    start: int


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
    def told_before(self) -> bool:
        """True if the word stands in the context, but not in its own sentence."""
        return self.seen and not _stands_in(self.sentence, self.word)


@dataclass(frozen=True)
class LastWord:
    """A passage in tokens, whose answer is its last word."""

    row: Prompt
    seen: bool


@dataclass(frozen=True)
class PassageWord:
    """A last word that stands earlier in its passage: after the passage, and after its sentence."""

    row: Prompt
    alone: Prompt


@dataclass(frozen=True)
class Needle:
    """A context with a fact in it.

    Attributes:
        row: Its tokens; the number is the answer.
        depth: Share of the text before the fact.
        fact: Places of the tokens of the fact.
    """

    row: Prompt
    depth: float
    fact: range


def prompt_of(tokenizer: Any, context: str, answer: str, before: Sequence[int] = ()) -> Prompt:
    """Return a context and, after a space, its answer, in tokens; ``before`` precede them."""
    texts = [context, f"{context} {answer}"]
    alone, ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    same = takewhile(lambda pair: pair[0] == pair[1], zip(alone, ids, strict=False))
    return Prompt([*before, *ids], len(before) + sum(1 for _ in same))


@torch.no_grad()
def answered(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    batch_size: int,
    progress: Progress = lambda done, total: None,
) -> Floats:
    """Return, per prompt, 1 where the model gives its answer, else 0.

    Args:
        model: A causal language model.
        prompts: None longer than the model takes.
        batch_size: Prompts per forward pass; no result depends on it.
        progress: Called with prompts done and prompts in all.
    """
    by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number].ids))
    hits = np.zeros(len(prompts))
    for start in range(0, len(prompts), batch_size):
        part = by_length[start : start + batch_size]
        hits[part] = _hits(model, [prompts[number] for number in part])
        progress(start + len(part), len(prompts))
    return hits


def _hits(model: PreTrainedModel, prompts: Sequence[Prompt]) -> Floats:
    ids = pad_sequence([torch.tensor(prompt.ids) for prompt in prompts], batch_first=True)
    lengths = torch.tensor([len(prompt.ids) for prompt in prompts])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    first = torch.tensor([prompt.start for prompt in prompts])
    places = first[:, None] + torch.arange(int((lengths - first).max()))
    inside = places < lengths[:, None]
    places = places.minimum(lengths[:, None] - 1)  # of shorter answers, the last token again
    likeliest = logits_at(model, ids, mask.long(), places - 1).argmax(-1).cpu()
    right: Floats = ((likeliest == ids.gather(1, places)) | ~inside).all(1).double().numpy()
    return right


def last_words(given: Iterable[Passage], tokenizer: Any, most: int | None) -> tuple[LastWord, ...]:
    """Return passages as prompts, without those of more than ``most`` tokens."""
    before = around(tokenizer).before
    words = (
        LastWord(prompt_of(tokenizer, one.context, one.word, before), one.seen) for one in given
    )
    return tuple(
        word for word in words if word.row.start and (most is None or len(word.row.ids) <= most)
    )


def last_word_columns(words: Sequence[LastWord], hits: Floats) -> dict[str, Floats]:
    """Return, per passage, the columns of last words; those without a value are left out."""
    seen = np.array([float(word.seen) for word in words])
    columns = dict(zip(LAST_WORDS, (hits, seen, hits * seen), strict=True))
    return dict(list(columns.items())[: 3 if seen.any() else 1 if len(hits) else 0])


def passage_words(
    given: Iterable[Passage], tokenizer: Any, most: int | None
) -> tuple[PassageWord, ...]:
    """Return passages as prompts, without those of more than ``most`` tokens."""
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


def needed(
    model: PreTrainedModel,
    words: Sequence[PassageWord],
    batch_size: int,
    progress: Progress = lambda done, total: None,
) -> list[Prompt]:
    """Return the passages that the original needs: without them it does not predict the word."""
    hits = answered(model, [word.row for word in words], batch_size, progress)
    known = [word for word, hit in zip(words, hits, strict=True) if hit]
    hits = answered(model, [word.alone for word in known], batch_size)
    return [word.row for word, hit in zip(known, hits, strict=True) if not hit]


def passages(
    texts: Iterable[str], count: int, among: Callable[[Passage], bool] = lambda passage: True
) -> tuple[Passage, ...]:
    """Cut text, in rows or lines, into passages; return ``count`` of some at most, evenly."""
    whole = [passage for block in _blocks(texts) for passage in _cut(block) if among(passage)]
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


def _cut(block: str) -> Iterator[Passage]:
    words: list[str] = []
    for sentence in _sentences(block):
        words += sentence
        passage = _without_end(words, len(sentence)) if len(words) >= _WORDS.start else None
        if passage is not None and len(words) in _WORDS:
            yield passage
        if passage is not None or len(words) >= _WORDS.stop:
            words = []


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


def _without_end(words: Sequence[str], of_last: int) -> Passage | None:
    text = " ".join(words)
    context, _, word = text.rstrip(f"{_STOPS}{_CLOSING} ").rpartition(" ")
    if not (word.isalpha() and len(word) >= _LETTERS):
        return None
    before = " ".join(words[: len(words) - of_last])
    return Passage(context, word, _stands_in(context, word), context[len(before) :].strip())


def _stands_in(text: str, word: str) -> bool:
    return word.lower() in re.findall(r"[^\W\d_]+", text.lower())


def needles(
    examples: Examples,
    tokenizer: Any,
    most: int | None,
    config: NeedleConfig,
    seed: int,
    vocabulary: int | None = None,
) -> tuple[Needle, ...]:
    """Return contexts of every length, with the fact at every depth, shorter ones first.

    Args:
        examples: The text around the facts.
        tokenizer: The model's tokenizer.
        most: Tokens that model and tokenizer take; None for any number.
        config: Lengths, and needles per length and depth.
        seed: Seed of the numbers.
        vocabulary: Tokens that the model has embeddings for; None if unknown.

    Raises:
        DataError: If a context is too long for the model or the text, or too short for the fact.
    """
    lengths = config.needle_lengths or tuple(n for n in NEEDLE_LENGTHS if most is None or n <= most)
    lengths = tuple(sorted(set(lengths or [n for n in [most] if n is not None])))
    if most is not None and lengths[-1] > most:
        raise DataError(
            f"A needle in {lengths[-1]:,} tokens: model and tokenizer take {most:,} at most. Give "
            "shorter needle_lengths."
        )

    def of_length(tokens: int) -> Dataset:
        trials = config.needle_trials
        return windows(examples, tokenizer, tokens, need=0, vocabulary=vocabulary, most=trials)[0]

    texts = of_length(lengths[-1])
    while not len(texts) and not config.needle_lengths and len(lengths) > 1:
        lengths = lengths[:-1]  # a default length
        texts = of_length(lengths[-1])
    if not len(texts):
        raise DataError(
            f"A needle in {lengths[-1]:,} tokens: the text has fewer. Give more text, or shorter "
            "needle_lengths."
        )
    draw, result = np.random.default_rng(seed), []
    first = len(around(tokenizer).before)
    for length in lengths:
        for depth in NEEDLE_DEPTHS:
            for trial in range(config.needle_trials):
                key, number = draw.choice(_KEYS), str(draw.integers(10_000, 100_000))
                text = texts[trial % len(texts)]["input_ids"]
                fact = _FACT.format(key=key)
                result.append(_hidden(tokenizer, text[:length], first, depth, fact, number))
    return tuple(result)


def _hidden(
    tokenizer: Any, text: Sequence[int], first: int, depth: float, fact: str, number: str
) -> Needle:
    """Return a context as long as the text, whose words begin at ``first``."""
    length = len(text)
    needle = tokenizer(f"{fact} {number}.\n", add_special_tokens=False)["input_ids"]
    question = prompt_of(tokenizer, fact, number)
    room = length - first - len(needle) - len(question.ids)
    if room < _LEAST_TEXT:
        raise DataError(
            f"A needle in {length:,} tokens: with its question it takes {length - room}, and "
            f"{_LEAST_TEXT} of text are needed besides. Give needle_lengths of "
            f"{length - room + _LEAST_TEXT} or more."
        )
    before = first + round(depth * room)
    ids = [*text[:before], *needle, *text[before : first + room]]
    row = Prompt([*ids, *question.ids], len(ids) + question.start)
    return Needle(row, depth, range(before, before + len(needle)))
