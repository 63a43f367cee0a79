"""Text whose end asks for what was said far back.

    ... The access code of the museum is 48213. ... The owner of the bakery is Clara Jensen. ...
    [more text than a window] The access code of the museum is -> 48213

Numbers, names and a few words of the text itself are said once each, early; the labels are the
answers. DuoAttention (Xiao et al. 2024, arXiv 2410.10819) hides passkeys so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headprune.data.passages import prompt_of
from headprune.model.answers import Prompt

_PLACES = ("museum", "bakery", "harbour", "library", "station", "theatre", "hospital", "factory")
_FIRST = ("Clara", "Peter", "Maria", "Thomas", "Julia", "Daniel", "Emma", "Victor")
_LAST = ("Jensen", "Moore", "Keller", "Rossi", "Hughes", "Novak", "Baker", "Lopez")
_WORDS = 12  # tokens of text that are said again
_LEAST_TEXT = 16  # tokens among facts


def far_rows(
    texts: Sequence[Sequence[int]], tokenizer: Any, window: tuple[int, int], first: int, seed: int
) -> list[dict[str, list[int]]]:
    """Put facts into sequences of tokens, and ask for them at the end.

    Args:
        texts: Tokens; a row keeps the length of its text.
        tokenizer: The model's tokenizer.
        window: Size and sinks; questions lie beyond it.
        first: Tokens that a tokenizer begins a text with.
        seed: Seed of facts and places.

    Returns:
        Rows of ``input_ids`` and ``labels``; none where the facts do not fit.
    """
    draw, rows = np.random.default_rng(seed), []
    first = max(first, window[1])
    for number, text in enumerate(texts):
        other = texts[(number + 1) % len(texts)]
        facts = _facts(tokenizer, other, draw)
        row = _asking(tokenizer, text, facts, first, window[0], draw)
        if row is not None:
            rows.append(row)
    return rows


def _facts(tokenizer: Any, text: Sequence[int], draw: np.random.Generator) -> list[tuple[str, str]]:
    """Return beginnings and ends of sentences: a number, a name and words of a text."""
    places = draw.permutation(_PLACES)
    at = int(draw.integers(max(1, len(text) - _WORDS)))
    words = " ".join(tokenizer.decode(text[at : at + _WORDS], skip_special_tokens=True).split())
    return [
        (f"\nThe access code of the {places[0]} is", str(draw.integers(10_000, 100_000))),
        (
            f"\nThe owner of the {places[1]} is called",
            f"{draw.choice(_FIRST)} {draw.choice(_LAST)}",
        ),
        (f"\nThe sign at the {places[2]} says:", words or places[3]),
    ]


def _asking(
    tokenizer: Any,
    text: Sequence[int],
    facts: Sequence[tuple[str, str]],
    first: int,
    size: int,
    draw: np.random.Generator,
) -> dict[str, list[int]] | None:
    said = tokenizer([f"{a} {b}.\n" for a, b in facts], add_special_tokens=False)["input_ids"]
    questions = [prompt_of(tokenizer, a, b) for a, b in facts]
    room = len(text) - first - sum(map(len, said)) - sum(len(q.ids) for q in questions)
    if room - size < _LEAST_TEXT:
        return None
    ids, rest = list(text[:first]), list(text[first : first + room])
    places = sorted(draw.choice(room - size, len(facts)).tolist())
    for place, before, sentence in zip(places, [0, *places], said, strict=False):
        ids += rest[before:place] + sentence
    ids += rest[places[-1] :]
    labels = [-100] * len(ids)
    for at in draw.permutation(len(facts)):
        question: Prompt = questions[at]
        ids += question.ids
        labels += [-100] * question.start + question.ids[question.start :]
    return {"input_ids": ids, "labels": labels}
