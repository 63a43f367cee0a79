"""Probes of a causal language model: prompts, and whether it answers them.

**Last words**, in the spirit of LAMBADA (Paperno et al. 2016, arXiv 1606.06031), of passages from
any text (``data.passages``).

**Passage words** are last words that only the passage tells (``evidence.recall``).

**Needles** are numbers of five digits hidden in text (``data.needles``). Perplexity hardly weighs
what comes from far back: a cut may keep it and retrieve nothing beyond a few hundred tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headprune.data.needles import Template
from headprune.data.passages import Passage, prompt_of
from headprune.data.tokens import around
from headprune.model.answers import Prompt

LAST_WORDS = ("last_word_hits",)
PASSAGE_WORDS = ("passage_word_hits",)
NEEDLES = ("needle_hits", "needle_answer_nats")
FEWEST = 50  # passage words that a share of them rests on

SECRETS = Template(
    "\nThe secret number of the {key} is",
    ("bridge", "castle", "engine", "forest", "garden", "island", "kitchen", "river", "village"),
)


def last_words(given: Iterable[Passage], tokenizer: Any, most: int | None) -> tuple[Prompt, ...]:
    """Return passages as prompts, without those of more than ``most`` tokens."""
    before = around(tokenizer).before
    words = (prompt_of(tokenizer, one.context, one.word, before) for one in given)
    return tuple(word for word in words if word.start and (most is None or len(word.ids) <= most))
