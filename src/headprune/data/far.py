"""Text with questions at its end about facts far back in it.

    ... The access code of the museum is 48213. ... The owner of the bakery is called Clara Keller.
    ... [more text than a window] The access code of the museum is -> 48213

A number, a name and a few words of the text are said once each, early; the labels are the answers.
DuoAttention (Xiao et al. 2024, arXiv 2410.10819) chooses heads by passkeys in this way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from headprune.data.passages import prompt_of
from headprune.model.answers import Prompt

_PLACES = ("museum", "bakery", "harbour", "library", "station", "theatre", "hospital", "factory")
_FIRST = ("Clara", "Peter", "Maria", "Thomas", "Julia", "Daniel", "Emma", "Victor")
_LAST = ("Jensen", "Moore", "Keller", "Rossi", "Hughes", "Novak", "Baker", "Lopez")
_WORDS = 12  # tokens of text to say again
_LEAST_TEXT = 16  # tokens of text before the last fact

Fact = tuple[list[int], Prompt]  # a sentence in tokens, and its beginning as a prompt for its end


def far_rows(
    texts: Sequence[Sequence[int]], tokenizer: Any, window: tuple[int, int], first: int, seed: int
) -> list[dict[str, list[int]]]:
    """Put facts into sequences of tokens, and ask for them at the end.

    Args:
        texts: Tokens; a row keeps the length of its text.
        tokenizer: The model's tokenizer.
        window: Size and sinks; facts lie behind the sinks, and further back than the window.
        first: Special tokens that a text begins with.
        seed: Seed of facts and places.

    Returns:
        Rows of ``input_ids`` and ``labels``; none of texts that are too short, or where the
        tokenizer does not know the words.
    """
    draw, rows = np.random.default_rng(seed), []
    for number, text in enumerate(texts):
        facts = list(_facts(texts[number - 1], tokenizer, draw))
        while facts and (room := _room(text, facts, window, first)) < _LEAST_TEXT:
            facts.pop()
        if facts:
            rows.append(_asking(text, facts, max(first, window[1]), room, draw))
    return rows


def _facts(text: Sequence[int], tokenizer: Any, draw: np.random.Generator) -> Iterator[Fact]:
    places, at = draw.permutation(_PLACES), int(draw.integers(max(1, len(text) - _WORDS)))
    words = " ".join(tokenizer.decode(text[at : at + _WORDS], skip_special_tokens=True).split())
    for begin, end in (
        (f"\nThe access code of the {places[0]} is", f"{draw.integers(10_000, 100_000)}"),
        (
            f"\nThe owner of the {places[1]} is called",
            f"{draw.choice(_FIRST)} {draw.choice(_LAST)}",
        ),
        (f"\nThe sign at the {places[2]} says:", words or places[3]),
    ):
        said = tokenizer(f"{begin} {end}.\n", add_special_tokens=False)["input_ids"]
        question = prompt_of(tokenizer, begin, end)
        if tokenizer.unk_token_id not in {*said, *question.ids} and question.start:
            yield said, question


def _room(text: Sequence[int], facts: Sequence[Fact], window: tuple[int, int], first: int) -> int:
    """Return how many tokens of a text are left to put facts among."""
    needed = sum(len(said) + len(question.ids) for said, question in facts)
    return len(text) - max(first, window[1]) - needed - window[0]


def _asking(
    text: Sequence[int], facts: Sequence[Fact], first: int, room: int, draw: np.random.Generator
) -> dict[str, list[int]]:
    asked = sum(len(said) + len(question.ids) for said, question in facts)
    rest = list(text[first : len(text) - asked])
    ids, last = list(text[:first]), 0
    places = sorted(draw.choice(room, len(facts)).tolist())
    for place, number in zip(places, draw.permutation(len(facts)), strict=True):
        ids += rest[last:place] + facts[number][0]
        last = place
    ids += rest[last:]
    labels = [-100] * len(ids)
    for number in draw.permutation(len(facts)):
        question = facts[number][1]
        ids += question.ids
        labels += [-100] * question.start + question.ids[question.start :]
    return {"input_ids": ids, "labels": labels}
