"""A text in three parts: fit, choose and report."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset
from numpy.typing import NDArray

from headprune.config import sequences_per_pass
from headprune.model.batch import Batch

Collate = Callable[[list[dict[str, Any]]], Batch]
HELD_OUT = 8  # one in N documents, blocks or sequences
MOST_HELD_OUT = 16  # rows that healing chooses by, and as many that it reports of
LONGEST = 2  # times the mean length: one pass over all rows pads them to the longest
_AT_ONCE = 1000  # rows
SHIPPED = Path(__file__).with_name("mixed")  # texts that come with headprune


class Split(NamedTuple):
    """Numbers of rows, ascending, in three parts without a common one."""

    fit: list[int]
    choose: list[int]
    report: list[int]


def evenly(total: int, count: int) -> list[int]:
    """Return ``count`` of the numbers from 0 to below ``total``, evenly, the first among them."""
    return [i * total // count for i in range(count)]


def split(total: int, fit: int, held_out: int | None = None) -> Split:
    """Split the rows of a text, each part evenly over it; nothing else in the package splits.

    Fit comes first. Of the rest, every other row is for choose and the others for report; of a
    lone one, choose.

    - Calibration fits on its budget of tokens, and holds out one row in four besides, an eighth
      for each part. A text that the budget takes as a whole has none to hold out.
    - Healing holds out 8 to 16 rows for each part, of short texts an eighth; see ``split_windows``.
    - ``compress`` holds out an eighth of the documents or blocks; of fewer than eight, none.

    Args:
        total: Rows of the text.
        fit: Rows to fit on.
        held_out: Rows of choose and report together; None for all of the rest.
    """
    fitted = evenly(total, fit)
    rest = sorted(set(range(total)) - set(fitted))
    held = [rest[i] for i in evenly(len(rest), min(len(rest), held_out or sys.maxsize))]
    return Split(fitted, held[::2], held[1::2])


def split_windows(documents: NDArray[np.int64], count: int) -> Split:
    """Split windows of running text: ``count`` to choose by, as many to report of, the rest to fit.

    Runs of windows are held out, and the windows that adjoin a run are lost. Where there are eight
    runs of whole documents, parts share no document. Otherwise runs are short, but long enough to
    lose no more than about an eighth of the windows.

    Args:
        documents: The document that each window begins in.
        count: Windows to choose by.
    """
    total = len(documents)
    size = 1 + min(count, -(-4 * HELD_OUT * count // total))  # the last window is lost
    runs = _runs((1 + np.flatnonzero(np.diff(documents))).tolist(), total, size)
    if len(runs) < HELD_OUT:
        runs = _runs(range(total), total, size)
    needed = -(-2 * count // max(1, total // len(runs) - 1))
    held = min(len(runs), max(needed, min(2 * count // (size - 1), len(runs) // HELD_OUT)))
    parts = split(len(runs), len(runs) - held)
    alone = [[row for at in part for row in runs[at][:-1]] for part in parts[1:]]
    before = {row - 1 for part in alone for row in part}
    fit = [row for at in parts.fit for row in runs[at] if row not in before]
    few = ([rows[at] for at in evenly(len(rows), min(count, len(rows)))] for rows in alone)
    return Split(fit, *few)


def _runs(starts: Iterable[int], total: int, size: int) -> list[range]:
    """Cut rows into runs of at least ``size``, each from one of some starts."""
    cuts = [0]
    for row in starts:
        if row - cuts[-1] >= size and total - row >= size:
            cuts.append(row)
    return [range(a, b) for a, b in pairwise([*cuts, total])]


def rows_of(tokens: int, length: int) -> int:
    """Return how many rows of a length a calibration of some tokens takes, held-out ones too."""
    count = max(1, tokens // length)
    return count + 2 * max(1, count // HELD_OUT)


@dataclass(frozen=True)
class Sequences:
    """Tokenized sequences, and how they make batches.

    Attributes:
        rows: The sequences.
        collate: Makes a batch of some of them.
        longest: Tokens of a row at most; a longer one loses those before its last.
        batch_size: Sequences per batch; fewer of long ones.
    """

    rows: Dataset
    collate: Collate
    longest: int | None = None
    batch_size: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return int(lengths(self.rows, self.longest).sum())

    def batches(self, size: int | None = None) -> list[Batch]:
        """Return all sequences in batches of ``size``, or of the usual size of a pass."""
        longest = int(lengths(self.rows, self.longest).max(initial=1))
        count = size or sequences_per_pass(self.batch_size, longest)
        return [self._batch(start, start + count) for start in range(0, len(self.rows), count)]

    def whole(self) -> Batch:
        """Return all sequences in one batch, padded where they differ in length."""
        return self._batch(0, len(self.rows))

    def some(self, tokens: int) -> Sequences:
        """Return sequences of about ``tokens`` tokens, spread evenly; two at least."""
        count = max(2, len(self.rows) * tokens // max(self.tokens, 1))
        if count >= len(self.rows):
            return self
        return replace(self, rows=self.rows.select(evenly(len(self.rows), count)))

    def _batch(self, start: int, stop: int) -> Batch:
        rows = [self.rows[i] for i in range(start, min(stop, len(self.rows)))]
        return self.collate([cut(row, self.longest or sys.maxsize) for row in rows])


@dataclass(frozen=True)
class Text:
    """Sequences of a text in three parts; see ``split``.

    Attributes:
        fit: For scores, refits and merges.
        choose: For choices between results; empty where the text is short.
        report: For the numbers of the choice, used once; empty where the text is short.
    """

    fit: Sequences
    choose: Sequences
    report: Sequences

    @classmethod
    def calibration(
        cls,
        rows: Dataset,
        collate: Collate,
        tokens: int,
        whole: bool = True,
        batch_size: int = 1,
    ) -> Text:
        """Fit on about ``tokens`` tokens, on one row at least.

        Unless ``whole``, rows that are much longer than the others are cut.
        """
        longest = None if whole else longest_of(rows)
        mean = float(lengths(rows, longest).mean())
        count = min(len(rows), max(1, int(tokens / mean)))
        parts = split(len(rows), count, 2 * max(1, count // HELD_OUT))
        how = (collate, longest, batch_size)
        return cls(*(Sequences(rows.select(numbers), *how) for numbers in parts))


def lengths(
    rows: Dataset, longest: int | None = None, column: str = "input_ids"
) -> NDArray[np.int64]:
    """Return the tokens of every row, at most ``longest``."""
    batches = rows.select_columns([column]).with_format("arrow").iter(_AT_ONCE)
    counts = [pc.list_value_length(batch.column(0)).to_numpy() for batch in batches]
    return np.minimum(np.concatenate([np.empty(0), *counts]).astype(np.int64), longest or 2**62)


def longest_of(rows: Dataset) -> int:
    """Return the length from which on a row is much longer than the others."""
    return max(2, math.ceil(LONGEST * float(lengths(rows).mean())))


def cut(row: dict[str, Any], longest: int) -> dict[str, Any]:
    """Return a row without the surplus tokens before its last; labels of a row stay whole."""
    labels: Any = row.get("labels")
    per_token = isinstance(labels, list) and len(labels) == len(row["input_ids"])
    of_row = set() if per_token and isinstance(labels[0], int) else {"labels"}  # else floats
    return {n: column if n in of_row else _cut(column, longest) for n, column in row.items()}


def _cut(column: Any, longest: int) -> Any:
    if not isinstance(column, list) or len(column) <= longest:
        return column
    return [*column[: longest - 1], column[-1]]
