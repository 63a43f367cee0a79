"""Probes of a causal language model: prompts, and whether it answers them.

**Last words**, in the spirit of LAMBADA (Paperno et al. 2016, arXiv 1606.06031), of passages from
any text (``data.passages``).

**Passage words** are last words that only the passage tells (``evidence.recall``).

**Needles**: a sentence with a random number of five digits is put into text, at some depth. After
the text the sentence begins again; its number is the answer. Perplexity hardly weighs what comes
from far back: a cut may keep it and retrieve nothing beyond a few hundred tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset

from headprune.config import NEEDLE_DEPTHS, NEEDLE_LENGTHS, NeedleConfig
from headprune.data.passages import Passage, prompt_of
from headprune.data.read import Examples
from headprune.data.sequences import windows
from headprune.data.tokens import around
from headprune.errors import DataError
from headprune.model.answers import Prompt

LAST_WORDS = ("last_word_hits",)
PASSAGE_WORDS = ("passage_word_hits",)
NEEDLES = ("needle_hits",)
FEWEST = 50  # passage words that a share of them rests on

_FACT = "\nThe secret number of the {key} is"
_KEYS = ("bridge", "castle", "engine", "forest", "garden", "island", "kitchen", "river", "village")
_LEAST_TEXT = 16  # tokens around a needle


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


def last_words(given: Iterable[Passage], tokenizer: Any, most: int | None) -> tuple[Prompt, ...]:
    """Return passages as prompts, without those of more than ``most`` tokens."""
    before = around(tokenizer).before
    words = (prompt_of(tokenizer, one.context, one.word, before) for one in given)
    return tuple(word for word in words if word.start and (most is None or len(word.ids) <= most))


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
