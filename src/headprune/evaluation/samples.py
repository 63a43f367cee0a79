"""What an evaluation keeps of every sequence or example, and the metrics as functions of it.

One formula per metric gives its value on all sequences and on every resample of them, so that two
models, or a model and the record of an earlier run, are compared sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headprune.evaluation.comparison import Statistic, rank_correlation

Columns = Mapping[str, NDArray[np.float64]]
Formula = Callable[[Columns, NDArray[np.int64]], Any]


def _nll(columns: Columns, i: NDArray[np.int64]) -> Any:
    return columns["nll_nats"][i].sum(-1) / columns["tokens"][i].sum(-1)


def _bits_per_byte(columns: Columns, i: NDArray[np.int64]) -> Any:
    return columns["nll_nats"][i].sum(-1) / (np.log(2) * columns["utf8_bytes"][i].sum(-1))


def _spearman(columns: Columns, i: NDArray[np.int64]) -> Any:
    def of_one(row: NDArray[np.int64]) -> float:
        return rank_correlation(columns["similarities"][row], columns["scores"][row])

    return np.apply_along_axis(of_one, -1, i)


# metric -> (the columns it is made of, formula)
FORMULAS: dict[str, tuple[tuple[str, ...], Formula]] = {
    "perplexity": (("nll_nats", "tokens"), lambda c, i: np.exp(_nll(c, i))),
    "nll_nats_per_token": (("nll_nats", "tokens"), _nll),
    "bits_per_byte": (("nll_nats", "utf8_bytes"), _bits_per_byte),
    "accuracy": (("hits",), lambda c, i: c["hits"][i].mean(-1)),
    "spearman": (("similarities", "scores"), _spearman),
    "mean_cosine": (("cosines",), lambda c, i: c["cosines"][i].mean(-1)),
}


@dataclass(frozen=True)
class Samples:
    """Numbers per sequence or example.

    Attributes:
        columns: Of shape (sequences,): "nll_nats", "tokens" and "utf8_bytes" of a language model,
            "hits" of a classifier, "similarities" and "scores" of sentence pairs, "cosines" of
            embeddings with those of the base.
    """

    columns: Columns

    def metrics(self) -> tuple[str, ...]:
        """The metrics that the columns give."""
        return tuple(
            name for name, (needed, _) in FORMULAS.items() if set(needed) <= set(self.columns)
        )

    def count(self, metric: str) -> int:
        """Windows or examples behind a metric."""
        return len(self.columns[FORMULAS[metric][0][0]])

    def statistic(self, metric: str) -> Statistic:
        """A metric as a function of the sequences that count."""
        formula = FORMULAS[metric][1]
        return lambda i: formula(self.columns, i)
