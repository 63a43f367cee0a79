"""What an evaluation keeps of every sequence or example; metrics are functions of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from headprune.evaluation.comparison import Numbers, Statistic
from headprune.evaluation.metrics import METRICS, Columns, is_score, parted, spec_of, within


@dataclass(frozen=True)
class Samples:
    """Numbers per sequence or example.

    A column of a further domain has its name in brackets (``nll_nats[brown]``), and so has a
    metric. A column of a task of lm-eval is a score itself (``lambada_openai:acc``).

    Attributes:
        columns: Of shape (sequences,): "nll_nats", "tokens" and "utf8_bytes" of a language model,
            "words", "word_hits", "seen_words", "seen_word_hits", "copied_nll_nats",
            "copied_tokens", "repeated_nll_nats", "repeated_tokens", "last_word_hits",
            "seen_last_words", "seen_last_word_hits" and "needle_hits" of one that generates,
            "hits" of a classifier, "label_hits" and "labels" of one of several labels,
            "similarities" and "scores" of sentence pairs or of predicted numbers, "cosines" of
            embeddings with those of the base.
        documents: By column, the number of the document that each window of a text begins in;
            nothing of columns whose rows have nothing to do with each other.
    """

    columns: Columns
    documents: Mapping[str, Numbers] = field(default_factory=dict)

    def metrics(self) -> tuple[str, ...]:
        """The metrics that the columns give."""
        known = set(self.columns)
        domains = dict.fromkeys(parted(name)[1] for name in self.columns)
        found = [
            within(name, domain)
            for domain in domains
            for name, spec in METRICS.items()
            if spec.formula is not None and {within(c, domain) for c in spec.columns} <= known
        ]
        return (*found, *filter(is_score, self.columns))

    def count(self, metric: str) -> int:
        """Sequences or examples behind a metric."""
        return len(next(iter(self._of(metric).values())))

    def documents_of(self, metric: str) -> Numbers | None:
        """The documents of the windows behind a metric, if they are of some."""
        names = [within(name, parted(metric)[1]) for name in spec_of(metric).columns]
        return next((self.documents[name] for name in names if name in self.documents), None)

    def statistic(self, metric: str) -> Statistic:
        """A metric as a function of the sequences that count."""
        columns, formula = self._of(metric), spec_of(metric).formula
        if formula is None:  # of a score; see ``metrics``
            return lambda i: columns[metric][i].mean(-1)
        return lambda i: formula(columns, i)

    def value(self, metric: str) -> float:
        """A metric of all sequences; no number where there is nothing to divide by."""
        with np.errstate(all="ignore"):
            return float(self.statistic(metric)(np.arange(self.count(metric))))

    def _of(self, metric: str) -> Columns:
        """The columns that a metric is made of, by the names that its formula has for them."""
        if is_score(metric):
            return {metric: self.columns[metric]}
        _, domain = parted(metric)
        return {c: self.columns[within(c, domain)] for c in spec_of(metric).columns}
