"""Text with questions at its end about facts far back in it.

    ... The access code of the museum is 48213. ... The owner of the bakery is called Clara Keller.
    ... [more text than a window] The access code of the museum is -> 48213

A number, a name and a few words of another text are said once each, early; the labels are the
answers.
DuoAttention (Xiao et al. 2024, arXiv 2410.10819) chooses heads by passkeys in this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headprune.data.passages import prompt_of

_PLACES = ("museum", "bakery", "harbour", "library", "station", "theatre", "hospital", "factory")
_FIRST = ("Clara", "Peter", "Maria", "Thomas", "Julia", "Daniel", "Emma", "Victor")
_LAST = ("Jensen", "Moore", "Keller", "Rossi", "Hughes", "Novak", "Baker", "Lopez")
_WORDS = 12  # tokens of text to say again
_LEAST_TEXT = 16  # tokens of text to put facts among


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
    draw, rows, first = np.random.default_rng(seed), [], max(first, window[1])
    for number, text in enumerate(texts):
        other = texts[number - 1] if len(texts) > 1 else ()  # its own words may stand near the end
        facts = _facts(other, tokenizer, draw)
        said = tokenizer([f"{begin} {end}.\n" for begin, end in facts], add_special_tokens=False)
        sentences, questions = said["input_ids"], [prompt_of(tokenizer, *fact) for fact in facts]
        asked = [token for question in questions for token in question.ids]
        end = len(text) - len(asked) - sum(map(len, sentences))
        rest = list(text[first : max(first, end)])
        room = len(rest) - window[0]
        if room < _LEAST_TEXT or tokenizer.unk_token_id in asked:
            continue
        places = sorted(draw.choice(room, len(facts)).tolist(), reverse=True)
        for place, fact in zip(places, draw.permutation(len(facts)), strict=True):
            rest[place:place] = sentences[fact]
        row = {"input_ids": [*text[:first], *rest], "labels": [-100] * (first + len(rest))}
        for fact in draw.permutation(len(facts)):
            ids, start = questions[fact].ids, questions[fact].start
            row["input_ids"] += ids
            row["labels"] += [-100] * start + ids[start:]
        rows.append(row)
    return rows


def _facts(text: Sequence[int], tokenizer: Any, draw: np.random.Generator) -> list[tuple[str, str]]:
    """Return the beginnings and ends of sentences: a number, a name, and words of a text."""
    places, at = draw.permutation(_PLACES), int(draw.integers(max(1, len(text) - _WORDS)))
    words = " ".join(tokenizer.decode(text[at : at + _WORDS], skip_special_tokens=True).split())
    name = f"{draw.choice(_FIRST)} {draw.choice(_LAST)}"
    return [
        (f"\nThe access code of the {places[0]} is", str(draw.integers(10_000, 100_000))),
        (f"\nThe owner of the {places[1]} is called", name),
        *([(f"\nThe sign at the {places[2]} says:", words)] if words else []),
    ]
