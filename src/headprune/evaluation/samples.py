"""What an evaluation keeps of every sequence or example; metrics are functions of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headprune.evaluation.comparison import Statistic
from headprune.evaluation.metrics import METRICS, Columns


@dataclass(frozen=True)
class Samples:
    """Numbers per sequence or example.

    Attributes:
        columns: Of shape (sequences,): "nll_nats", "tokens" and "utf8_bytes" of a language model,
            "words", "word_hits", "seen_words", "seen_word_hits", "copied_nll_nats" and
            "copied_tokens" of one that generates,
            "hits" of a classifier, "similarities" and "scores" of sentence pairs, "cosines" of
            embeddings with those of the base.
    """

    columns: Columns

    def metrics(self) -> tuple[str, ...]:
        """The metrics that the columns give."""
        return tuple(
            name
            for name, spec in METRICS.items()
            if spec.formula is not None and set(spec.columns) <= set(self.columns)
        )

    def count(self, metric: str) -> int:
        """Sequences or examples behind a metric."""
        return len(self.columns[METRICS[metric].columns[0]])

    def statistic(self, metric: str) -> Statistic:
        """A metric as a function of the sequences that count."""
        formula = METRICS[metric].formula
        assert formula is not None  # see ``metrics``
        return lambda i: formula(self.columns, i)

    def value(self, metric: str) -> float:
        """A metric of all sequences; no number where there is nothing to divide by."""
        with np.errstate(all="ignore"):
            return float(self.statistic(metric)(np.arange(self.count(metric))))
