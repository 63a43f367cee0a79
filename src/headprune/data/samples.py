"""The part of a text that shows what heads do."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from headprune.config import sequences_per_pass
from headprune.data.rows import evenly, lengths
from headprune.model.batch import Batch
from headprune.tensors.least_squares import HELD_OUT

Collate = Callable[[list[dict[str, Any]]], Batch]
LONGEST = 2  # times the mean: a pass over all rows at once pads them to the longest


@dataclass(frozen=True)
class CalibrationSample:
    """Sequences that scores, refits and merges are computed on.

    Attributes:
        rows: The sequences.
        collate: Makes a batch of some of them.
        tokens: Tokens of all of them.
        longest: Tokens of a row at most; a longer one loses those before its last.
        batch_size: Sequences per batch; fewer of long ones.
        special_ids: Ids of special tokens.
        left: Sequences of the same text that were not taken.
    """

    rows: Dataset
    collate: Collate
    tokens: int
    longest: int | None = None
    batch_size: int = 1
    special_ids: tuple[int, ...] = ()
    left: Dataset | None = None

    @classmethod
    def spread(
        cls, rows: Dataset, collate: Collate, tokens: int, cut: bool = False, **others: Any
    ) -> CalibrationSample:
        """Takes rows from all over a text, evenly, that have about so many tokens together.

        Args:
            rows: All that there are.
            collate: Makes a batch of some of them.
            tokens: How many are wanted; one row is taken at least.
            cut: Cut rows that are much longer than the others; for rows of one text each.
            **others: Other attributes.
        """
        longest = longest_of(rows) if cut else None
        found = _read(rows, longest)
        count = min(len(rows), max(1, int(tokens / (int(found.sum()) / len(rows)))))
        numbers = evenly(len(rows), count)
        left = rows.select(sorted(set(range(len(rows))) - set(numbers)))
        taken = int(found[numbers].sum())
        return cls(rows.select(numbers), collate, taken, longest, left=left, **others)

    def held_out(self) -> CalibrationSample | None:
        """Two sequences for every ``HELD_OUT`` of these, from what was not taken, if it has some.

        They come one at a time, so that what is averaged over them counts each alike: one to
        choose by, then one to report of.
        """
        count = min(len(self.left or ()), 2 * max(1, len(self.rows) // HELD_OUT))
        if self.left is None or not count:
            return None
        rows = self.left.select(evenly(len(self.left), count))
        tokens = int(_read(rows, self.longest).sum())
        return replace(self, rows=rows, tokens=tokens, batch_size=1, left=None)

    def batches(self) -> list[Batch]:
        """All sequences, in batches."""
        longest = _read(self.rows, self.longest).max(initial=1)
        count = sequences_per_pass(self.batch_size, int(longest))
        return [self._batch(start, start + count) for start in range(0, len(self.rows), count)]

    def whole(self) -> Batch:
        """All sequences in one batch, padded where they differ in length."""
        return self._batch(0, len(self.rows))

    def first(self) -> Batch:
        """The first sequence alone."""
        return self._batch(0, 1)

    def _batch(self, start: int, stop: int) -> Batch:
        return self.collate([self._row(i) for i in range(start, min(stop, len(self.rows)))])

    def _row(self, number: int) -> dict[str, Any]:
        row: dict[str, Any] = self.rows[number]
        return row if self.longest is None else cut(row, self.longest)


def longest_of(rows: Dataset) -> int:
    """Tokens of a row from which on it is much longer than the others."""
    return max(2, math.ceil(LONGEST * float(lengths(rows).mean())))


def cut(row: dict[str, Any], longest: int) -> dict[str, Any]:
    """A row without the tokens before its last that are too many."""
    return {n: column if n == "labels" else _cut(column, longest) for n, column in row.items()}


def _read(rows: Dataset, longest: int | None) -> NDArray[np.int64]:
    """Tokens of every row that are read."""
    return np.minimum(lengths(rows), longest or sys.maxsize)


def _cut(column: Any, longest: int) -> Any:
    if not isinstance(column, list) or len(column) <= longest:
        return column
    return [*column[: longest - 1], column[-1]]
