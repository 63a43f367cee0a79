"""Recall of a causal language model from earlier in its context.

Perplexity is a mean over tokens, and most of them are decided by the few before. Words look further
back: of those in the second half of every sequence, the share whose tokens are all the likeliest
ones, each given all before it. Words that stand earlier in the sequence also count apart. They come
from the pass of the perplexity.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headprune.evaluation.metrics import Floats

WORDS = ("words", "word_hits", "seen_words", "seen_word_hits")

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
