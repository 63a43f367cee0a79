"""Recall of a causal language model from earlier in its context.

Perplexity is a mean over tokens, and most of them are decided by the few before. Two measures look
further back:

- Words: of the words in the second half of every sequence, the share whose tokens are all the
  likeliest ones, each given all before it; words that stand earlier in the sequence also count
  apart. They come from the pass of the perplexity.
- Copying: the loss on the second of two equal runs of random tokens, which only the first run
  tells (Olsson et al. 2022, arXiv 2209.11895, repeated random tokens); and on the second of two
  equal passages of text.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from headprune.data.text import evenly
from headprune.data.tokens import around
from headprune.evaluation.metrics import Floats
from headprune.model.placement import input_device

WORDS = ("words", "word_hits", "seen_words", "seen_word_hits")
COPYING = ("copied_nll_nats", "copied_tokens")
REPEATED = ("repeated_nll_nats", "repeated_tokens")

_SPACE = ("Ġ", "▁", " ")  # how tokens that begin a word begin
_WITHIN = ("-", "'", "’", "_")  # what stands within a word


class WordMarks:
    """Tokens that begin a word, that are letters alone, or that continue a word.

    Args:
        tokenizer: Its tokens must mark where words begin; else no word is known.
    """

    def __init__(self, tokenizer: Any) -> None:
        special = set(tokenizer.all_special_ids)
        tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        kept = ["" if i in special or t is None else str(t) for i, t in enumerate(tokens)]
        # byte-level tokens write a line break as a letter: decode before looking
        texts = [tokenizer.convert_tokens_to_string([t]).strip(" ") if t else "" for t in kept]
        self.begins = np.array([token.startswith(_SPACE) for token in kept])
        self.letters = np.array([text.isalpha() for text in texts])
        self.goes_on = ~self.begins & np.array(
            [text[:1].isalnum() or text[:1] in (*_WITHIN, "\ufffd") for text in texts]
        )

    @cached_property
    def any(self) -> bool:
        """True if the tokens mark words at all."""
        return bool((self.begins & self.letters).any())

    def words(self, ids: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return the ends of the words of a sequence.

        A word at the cut end of the sequence does not count. Nor does one that continues with a
        hyphen, an apostrophe, digits or part of a letter's bytes.
        """
        begins, letters, goes_on = self.begins[ids], self.letters[ids], self.goes_on[ids]
        words, start = [], -1
        for place in range(len(ids)):
            if start >= 0 and not (letters[place] and goes_on[place]):
                if not goes_on[place]:
                    words.append((start, place))
                start = -1
            if begins[place] and letters[place]:
                start = place
        return words


class RecalledWords:
    """Counts of predicted words, sequence by sequence."""

    def __init__(self, marks: WordMarks) -> None:
        self._marks = marks
        self._counts: list[tuple[int, int, int, int]] = []

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add sequences.

        Args:
            logits: Shape (sequences, tokens, vocabulary).
            labels: The tokens that they are to predict, shape (sequences, tokens).
        """
        right = (logits.argmax(-1) == labels.to(logits.device)).cpu().numpy()
        for ids, hit in zip(labels.cpu().numpy(), right, strict=True):
            self._counts.append(self._count(ids, hit))

    def _count(self, ids: NDArray[np.int64], hit: NDArray[np.bool_]) -> tuple[int, int, int, int]:
        known: set[tuple[int, ...]] = set()
        words = hits = seen = seen_hits = 0
        for start, stop in self._marks.words(ids):
            word = tuple(ids[start:stop].tolist())
            if start >= len(ids) // 2:
                predicted = int(hit[start:stop].all())
                words, hits = words + 1, hits + predicted
                if word in known:
                    seen, seen_hits = seen + 1, seen_hits + predicted
            known.add(word)
        return words, hits, seen, seen_hits

    def columns(self) -> dict[str, Floats]:
        """Return, per sequence, the columns of words; those without a word are left out."""
        counts = np.array(self._counts, dtype=np.float64).reshape(-1, 4).T
        columns = dict(zip(WORDS, counts, strict=True))
        some = 4 if columns["seen_words"].any() else 2 if columns["words"].any() else 0
        return dict(list(columns.items())[:some])


def copying_losses(
    model: PreTrainedModel, tokenizer: Any, count: int, length: int, batch_size: int, seed: int
) -> dict[str, Floats]:
    """Return losses on the second of two equal runs of random tokens.

    Args:
        model: A causal language model.
        tokenizer: Tokens are drawn from its ordinary ones.
        count: Sequences.
        length: Tokens of a sequence: both runs, and special tokens before a text.
        batch_size: Sequences per forward pass.
        seed: Seed of the tokens; the same for compared models.

    Returns:
        Per sequence, the summed loss in nats and the number of tokens.
    """
    size = model.config.get_text_config().vocab_size
    usual = set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)
    ids = np.array(sorted(number for number in usual if number < size))
    before = around(tokenizer).before
    run = np.random.default_rng(seed).choice(ids, (count, (length - len(before)) // 2))
    return dict(zip(COPYING, _second_time(model, before, run, batch_size), strict=True))


def repeated_losses(
    model: PreTrainedModel, tokenizer: Any, sequences: Dataset, count: int, batch_size: int
) -> dict[str, Floats]:
    """Return losses on the second of two equal passages: the first half of a sequence, twice.

    Takes ``repeated_rows`` of the sequences, of one length; returns as ``copying_losses``.
    """
    before = around(tokenizer).before
    some = sequences.select(repeated_rows(len(sequences), count))
    rows = np.array(some["input_ids"])[:, len(before) :]
    run = rows[:, : rows.shape[1] // 2]
    return dict(zip(REPEATED, _second_time(model, before, run, batch_size), strict=True))


def repeated_rows(total: int, count: int) -> list[int]:
    """Return the sequences that ``repeated_losses`` reads."""
    return evenly(total, min(total, count))


@torch.no_grad()
def _second_time(
    model: PreTrainedModel, before: list[int], run: NDArray[np.int64], batch_size: int
) -> tuple[Floats, Floats]:
    begins = np.tile(np.array(before, run.dtype), (len(run), 1))
    both, second = torch.from_numpy(np.concatenate([begins, run, run], axis=1)), run.shape[1]
    losses = []
    for part in both.split(batch_size):
        logits = model(input_ids=part.to(input_device(model)), use_cache=False).logits
        predicted = logits[:, -second - 1 : -1].float().cpu()
        loss = F.cross_entropy(predicted.mT, part[:, -second:], reduction="none")
        losses.append(loss.double().sum(1))
    return torch.cat(losses).numpy(), np.full(len(run), float(second))
