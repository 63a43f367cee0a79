"""Probes of a causal language model: prompts, and whether it answers them.

An answer is right if each of its tokens is the likeliest one, given those before it, which is what
greedy decoding would write. One pass over prompt and answer tells.

**Last words**, in the spirit of LAMBADA (Paperno et al. 2016, arXiv 1606.06031), of passages from
any text (``data.passages``); words that stand earlier in the passage also count apart.

**Passage words** are last words that only the passage tells: they stand in it, but not in their own
sentence, and the original predicts them after the passage, not after that sentence alone.

**Needles**: a sentence with a random number of five digits is put into text, at some depth. After
the text the sentence begins again; its number is the answer. Perplexity hardly weighs what comes
from far back: a cut may keep it and retrieve nothing beyond a few hundred tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from headprune.config import NEEDLE_DEPTHS, NEEDLE_LENGTHS, NeedleConfig
from headprune.data.passages import Passage, PassageWord, Prompt, prompt_of
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


_FACT = "\nThe secret number of the {key} is"
_KEYS = ("bridge", "castle", "engine", "forest", "garden", "island", "kitchen", "river", "village")
_LEAST_TEXT = 16  # tokens around a needle


@dataclass(frozen=True)
class LastWord:
    """A passage in tokens, whose answer is its last word."""

    row: Prompt
    seen: bool


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
