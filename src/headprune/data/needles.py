"""Needles: sentences with a number each, hidden in text; one of them is asked for at the end.

    ... The secret number of the castle is 48213. ... The secret number of the river is 90127. ...
    The secret number of the castle is -> 48213

After the text one sentence begins again; its number is the answer. To copy the last number is
rarely right. The fact in question lies beyond the window of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from headprune.config import NEEDLE_DEPTHS, NEEDLE_LENGTHS, NeedleConfig
from headprune.data.passages import prompt_of
from headprune.data.read import Examples
from headprune.data.sequences import windows
from headprune.data.tokens import around
from headprune.errors import DataError
from headprune.model.answers import Prompt
from headprune.model.batch import most_tokens
from headprune.model.cost import KVCache
from headprune.schemas.records import Window

_LEAST_TEXT = 16  # tokens around needles
_LEAST, _FIVE_DIGITS = 10_000, 90_000  # the lowest number, and how many there are
_FACT = "\nThe secret number of the {key} is"  # before its number
KEYS = ("bridge", "castle", "engine", "forest", "garden", "island", "kitchen", "river", "village")


@dataclass(frozen=True)
class Needle:
    """A context with facts in it, and a question about one of them.

    Attributes:
        row: Its tokens; the number is the answer.
        depth: Share of the text before the fact in question.
        fact: Places of the tokens of that fact.
        question: Place of the first token of the question.
    """

    row: Prompt
    depth: float
    fact: range
    question: int


def window_of(*models: PreTrainedModel) -> Window | None:
    """Return the widest window of any layer or head; None where all of them see everything.

    A window that is no smaller than the positions of its model hides nothing.
    """
    windows = list[Window]()
    for model in models:
        most = most_tokens(model)
        # a cache keeps one token less: the next one sees itself too
        own = [Window(size=kept + 1, sinks=0) for kept in KVCache.of(model).windows.values()]
        if of_heads := (getattr(model.config, "headprune", None) or {}).get("window"):
            own.append(Window(**of_heads))
        windows += [one for one in own if most is None or one.size < most]
    if not windows:
        return None
    return Window(size=max(w.size for w in windows), sinks=max(w.sinks for w in windows))


def needles(
    examples: Examples,
    tokenizer: Any,
    config: NeedleConfig,
    most: int | None,
    vocabulary: int | None = None,
    window: Window | None = None,
) -> tuple[Needle, ...]:
    """Return contexts of every length, the fact at every depth beyond the window, shorter first.

    Args:
        examples: The text around the facts.
        tokenizer: The model's tokenizer.
        config: Lengths, needles per length and depth, facts per context, and the seed.
        most: Tokens that model and tokenizer take; None for any number.
        vocabulary: Tokens that the model has embeddings for; None if unknown.
        window: No token of the question sees the fact through it; None for none.

    Raises:
        DataError: If a context is too long for the model or the text, or too short for the facts or
            the window.
    """
    lengths = config.needle_lengths or tuple(n for n in NEEDLE_LENGTHS if most is None or n <= most)
    lengths = tuple(sorted(set(lengths or [n for n in [most] if n is not None])))
    if most is not None and lengths[-1] > most:
        raise DataError(
            f"A needle in {lengths[-1]:,} tokens: model and tokenizer take {most:,} at most. Give "
            "shorter needle_lengths."
        )

    how: dict[str, Any] = {"need": 0, "vocabulary": vocabulary, "most": config.needle_trials}
    while not len(texts := windows(examples, tokenizer, lengths[-1], **how)[0]):
        if config.needle_lengths or len(lengths) == 1:
            raise DataError(
                f"A needle in {lengths[-1]:,} tokens: the text has fewer. Give more text, or "
                "shorter needle_lengths."
            )
        lengths = lengths[:-1]  # a default length
    draw, made = np.random.default_rng(config.seed), list[Needle]()
    first = max(len(around(tokenizer).before), window.sinks if window else 0)
    for length, depth, trial in product(lengths, NEEDLE_DEPTHS, range(config.needle_trials)):
        keys = draw.choice(KEYS, config.needle_keys, replace=False)
        numbers = _LEAST + draw.choice(_FIVE_DIGITS, config.needle_keys, replace=False)
        facts = [(_FACT.format(key=k), str(n)) for k, n in zip(keys, numbers, strict=True)]
        text = texts[trial % len(texts)]["input_ids"][:length]
        made.append(_hidden(tokenizer, text, first, depth, facts))
    size = window.size if window else 0
    beyond = tuple(one for one in made if one.fact.stop + size <= one.question + 1)
    useless = sorted({*lengths} - {len(one.row.ids) for one in beyond})
    if useless and (config.needle_lengths or not beyond):
        nearest = next(one for one in made if len(one.row.ids) == useless[-1])  # at depth 0
        least = useless[-1] - nearest.question + nearest.fact.stop + size - 1
        raise DataError(
            f"A needle in {useless[-1]:,} tokens: windows of {size:,} tokens reach every fact from "
            f"its end. Give needle_lengths of {least:,} or more."
        )
    return beyond


def _hidden(
    tokenizer: Any,
    text: Sequence[int],
    first: int,
    depth: float,
    facts: Sequence[tuple[str, str]],
) -> Needle:
    """Return a context as long as the text, with facts from ``first`` on; it asks for fact 0."""
    length, (begin, number) = len(text), facts[0]
    said = [f"{fact} {number}.\n" for fact, number in facts]
    sentences = tokenizer(said, add_special_tokens=False)["input_ids"]
    question = prompt_of(tokenizer, begin, number)
    room = length - first - sum(map(len, sentences)) - len(question.ids)
    if room < _LEAST_TEXT:
        fewer = ", or fewer needle_keys" if len(facts) > 1 else ""
        raise DataError(
            f"A needle in {length:,} tokens: with its question it takes {length - room}, and "
            f"{_LEAST_TEXT} of text are needed besides. Give needle_lengths of "
            f"{length - room + _LEAST_TEXT} or more{fewer}."
        )
    # the others follow it evenly, around the end of the text
    depths = [depth, *((depth + each / len(facts)) % 1 for each in range(1, len(facts)))]
    ids, rest, start = list(text[:first]), list(text[first : first + room]), 0
    for place, each in sorted((round(d * room), each) for each, d in enumerate(depths)):
        ids += rest[: place - room + len(rest)]
        del rest[: place - room + len(rest)]
        start = start if each else len(ids)
        ids += sentences[each]
    ids += rest
    row = Prompt([*ids, *question.ids], len(ids) + question.start)
    return Needle(row, depth, range(start, start + len(sentences[0])), len(ids))
