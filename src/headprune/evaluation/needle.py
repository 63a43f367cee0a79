"""Whether a causal language model finds a fact again, wherever it stands in its context.

A sentence with a number of five digits, drawn at random, is put into text of the evaluation, so
that some share of the text (its depth) stands before it. After the text the sentence begins again,
and the model is to go on with the number. It is found if greedy decoding writes every digit.

Perplexity is a mean in which what comes from far back hardly counts: a cut may keep it, and no
longer find anything that is further away than a few hundred tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset

from headprune.config import NEEDLE_DEPTHS, NEEDLE_LENGTHS, NeedleConfig
from headprune.data.read import Examples
from headprune.data.sequences import windows
from headprune.data.tokens import around
from headprune.errors import DataError
from headprune.evaluation.endings import Ending, ending_of
from headprune.evaluation.metrics import Columns
from headprune.evaluation.report import Retrieval

NEEDLE = ("needle_hits",)

_FACT = "\nThe secret number of the {key} is"
_KEYS = ("bridge", "castle", "engine", "forest", "garden", "island", "kitchen", "river", "village")
_LEAST_TEXT = 16  # tokens: with fewer, there is nothing to look through


@dataclass(frozen=True)
class Needle:
    """A context with a fact in it.

    Attributes:
        row: Its tokens; they end with the number.
        depth: Share of the text that stands before the fact.
        fact: Places of the tokens that tell it.
    """

    row: Ending
    depth: float
    fact: range


def needles(
    examples: Examples,
    tokenizer: Any,
    most: int | None,
    config: NeedleConfig,
    seed: int,
    vocabulary: int | None = None,
) -> tuple[Needle, ...]:
    """Contexts of every length, with the fact at every depth, shorter ones first.

    Args:
        examples: The text that facts are put into.
        tokenizer: The model's tokenizer.
        most: Tokens that model and tokenizer take; None for any number.
        config: Lengths, and how often each depth is tried.
        seed: Seed of the numbers.
        vocabulary: Tokens that the model has embeddings for; None where no model is at hand.

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
        most = config.needle_trials
        return windows(examples, tokenizer, tokens, need=0, vocabulary=vocabulary, most=most)[0]

    texts = of_length(lengths[-1])
    while not len(texts) and not config.needle_lengths and len(lengths) > 1:
        lengths = lengths[:-1]  # nobody asked for the longest
        texts = of_length(lengths[-1])
    if not len(texts):
        raise DataError(
            f"A needle in {lengths[-1]:,} tokens: the text has fewer. Give more text, or shorter "
            "needle_lengths."
        )
    draw, found = np.random.default_rng(seed), []
    first = len(around(tokenizer).before)
    for length in lengths:
        for depth in NEEDLE_DEPTHS:
            for trial in range(config.needle_trials):
                key, number = draw.choice(_KEYS), str(draw.integers(10_000, 100_000))
                text = texts[trial % len(texts)]["input_ids"]
                fact = _FACT.format(key=key)
                found.append(_hidden(tokenizer, text[:length], first, depth, fact, number))
    return tuple(found)


def retrieved(given: Sequence[Needle], columns: Columns) -> tuple[Retrieval, ...]:
    """How many were found, by context length and depth."""
    cells: dict[tuple[int, float], list[float]] = {}
    for needle, hit in zip(given, columns.get(*NEEDLE, np.zeros(0)).tolist(), strict=True):
        cells.setdefault((len(needle.row.ids), needle.depth), []).append(hit)
    return tuple(
        Retrieval(tokens=tokens, depth=depth, accuracy=sum(hits) / len(hits), n=len(hits))
        for (tokens, depth), hits in cells.items()
    )


def _hidden(
    tokenizer: Any, text: Sequence[int], first: int, depth: float, fact: str, number: str
) -> Needle:
    """A context of exactly as many tokens as the text has, whose words begin at ``first``."""
    length = len(text)
    needle = tokenizer(f"{fact} {number}.\n", add_special_tokens=False)["input_ids"]
    asked = ending_of(tokenizer, fact, number)
    room = length - first - len(needle) - len(asked.ids)
    if room < _LEAST_TEXT:
        raise DataError(
            f"A needle in {length:,} tokens: with its question it takes {length - room}, and "
            f"{_LEAST_TEXT} of text are needed besides. Give needle_lengths of "
            f"{length - room + _LEAST_TEXT} or more."
        )
    before = first + round(depth * room)
    ids = [*text[:before], *needle, *text[before : first + room]]
    row = Ending([*ids, *asked.ids], len(ids) + asked.start)
    return Needle(row, depth, range(before, before + len(needle)))
