"""Nearness of a model to the original, on text that nothing was calibrated on.

Language models are judged by perplexity, and classifiers by agreement with the original's labels.
Of models without a head, embeddings are compared with the original's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedModel

from headprune.compression.texts import CHARACTERS, Documents, Parts
from headprune.context import Progress, continued
from headprune.data.passages import passage_words
from headprune.data.text import HELD_OUT, evenly
from headprune.data.tokens import around, tokens_of
from headprune.errors import DataError
from headprune.evaluation.metrics import METRICS, Floats
from headprune.evaluation.quality import Pass
from headprune.evaluation.task_table import TASKS, Measure, RowSettings
from headprune.evaluation.written import COUNTED, references_of, write
from headprune.evidence.losses import example_losses
from headprune.evidence.recall import FEWEST, PASSAGES, passage_dependent_words
from headprune.evidence.windows import far_batches, sequence_of
from headprune.model.answers import Prompt, answered
from headprune.model.batch import Batch
from headprune.model.loading import task_of
from headprune.schemas.records import Window

_FAR_SEED = 1_000  # facts that no scores were made of
_FAR_ROWS = 4  # sequences with questions about facts far back
_ROWS = 8  # held-out rows, at least: half of them choose

Outputs = Mapping[str, Any]  # by text; see ``TaskRow.outputs``


@dataclass(frozen=True)
class Half:
    """Half of the held-out texts.

    Attributes:
        texts: The texts.
        rows: Sequences of some of each, by its name.
    """

    texts: tuple[Documents, ...]
    rows: Mapping[str, Dataset]


def _of_metric(name: str) -> Measure[Floats]:
    """Return the measure of a metric of written text."""
    formula = METRICS[name].formula
    assert formula is not None
    return Measure(name, METRICS[name].higher_is_better, lambda model, original: model, formula)


@dataclass(frozen=True)
class WrittenMetric:
    """A metric to choose by, and the most tokens to write for it."""

    metric: str
    most: int


@dataclass(frozen=True)
class Lengths:
    """Amounts of held-out text to read.

    Attributes:
        seq_len: Tokens of a sequence, at most.
        tokens: About how many tokens of all texts are used.
        batch_size: Sequences per pass.
        window: Sequences are as long as shows what lies beyond it, and answers far back count.
    """

    seq_len: int
    tokens: int
    batch_size: int
    window: Window | None = None


class HeldOut:
    """Held-out texts as a model reads them.

    Args:
        net: The original.
        tokenizer: Its tokenizer.
        texts: The texts in their parts; two are held out.
        lengths: How much of them is read.
        written: The metric that chooses, instead of the usual measure.

    Raises:
        DataError: If there is too little to choose on.
    """

    def __init__(
        self,
        net: PreTrainedModel,
        tokenizer: Any,
        texts: Parts,
        lengths: Lengths,
        written: WrittenMetric | None = None,
    ) -> None:
        self.lengths, self.window = lengths, lengths.window
        self.task, self.tokenizer, self.written = task_of(net), tokenizer, written
        self._row = TASKS[self.task]
        measure = self._row.measure if written is None else _of_metric(written.metric)
        assert measure is not None  # others are refused before
        self.measure: Measure[Any] = measure
        self._packs = self._row.closed is not None and written is None
        self.seq_len, self.batch_size = lengths.seq_len, lengths.batch_size
        if self.window is not None:
            texts = texts.held_out_as_one(-(-lengths.tokens // 2))
            longest = sequence_of(net, tokenizer, self.window)
            self.seq_len = self._beyond(texts, self.window, longest)
            self.batch_size = 1
        held_out = [(text, False) for text in texts.choose]
        held_out += [(text, True) for text in texts.report]
        if self._packs:
            self._refuse_short(texts)
        how = RowSettings(net, tokenizer, self.seq_len, judged=False)
        rows = {
            (text.name, reports): self._rows(text, how) for text, reports in held_out if text.rows
        }
        if not self._packs:
            _refuse_few(rows)
        share = -(-lengths.tokens // len(held_out))
        some = {part: _some(each, share) for part, each in rows.items()}
        self.choose, self.report = (
            Half(part, {text: each for (text, reports), each in some.items() if reports == half})
            for half, part in ((False, texts.choose), (True, texts.report))
        )
        self.tokens = sum(len(ids) for each in some.values() for ids in each["input_ids"])

    def outputs(self, net: PreTrainedModel, half: Half, progress: Progress) -> Outputs:
        """Return what comes out of a model, by text, on ``choose`` or ``report``."""
        done, total, outputs = 0, sum(map(len, half.rows.values())), {}
        for text, rows in half.rows.items():
            outputs[text] = self._outputs(net, rows, continued(progress, done, total))
            done += len(rows)
        return outputs

    def nearness(self, model: Outputs, original: Outputs) -> tuple[float, dict[str, float]]:
        """Return how near a model comes to the original: on all texts together, and on each."""
        by_text = {text: self.measure.rows(model[text], original[text]) for text in original}
        number = self.measure.number
        whole = float(number(np.concatenate(list(by_text.values()))))
        return whole, {text: float(number(rows)) for text, rows in by_text.items()}

    def words(self, net: PreTrainedModel, half: Half, progress: Progress) -> list[Prompt]:
        """Return the words of a half that the original, a language model, needs the passage for.

        Fewer than ``evidence.recall.FEWEST`` decide nothing: none are returned. Nor are any where
        a metric of written text chooses.
        """
        if self.task != "causal-lm" or self.written is not None:
            return []
        each = -(-PASSAGES // len(half.texts))
        some = [
            word
            for text in half.texts
            for word in passage_words(
                text.examples(), each, self.tokenizer, self.lengths.seq_len, inside=True
            )
        ]
        words = passage_dependent_words(net, some, self.lengths.batch_size, progress)
        return words if len(words) >= FEWEST else []

    def far(self, half: Half) -> list[Batch]:
        """Return questions about facts beyond the window in a half; none without a window."""
        if self.window is None:
            return []
        texts = [ids for rows in half.rows.values() for ids in rows["input_ids"]]
        batches = (
            batch
            for seed in range(_FAR_SEED, _FAR_SEED + _FAR_ROWS)
            for batch in far_batches(texts, self.tokenizer, self.window, seed)
        )
        return list(islice(batches, _FAR_ROWS))

    @torch.no_grad()
    def far_nats(self, net: PreTrainedModel, questions: Sequence[Batch]) -> float | None:
        """Return the mean loss of such answers; None without any."""
        losses = [example_losses(net, "causal-lm", batch) for batch in questions]
        return float(torch.cat(losses).mean()) if losses else None

    def kept(self, net: PreTrainedModel, words: Sequence[Prompt]) -> float | None:
        """Return the share of such words that a model predicts; None if there are none."""
        if not words:
            return None
        return float(answered(net, words, self.lengths.batch_size).hits.mean())

    def _refuse_short(self, texts: Parts) -> None:
        for purpose, part in (("choose", texts.choose), ("report", texts.report)):
            tokens = sum(self._tokens(text, self.seq_len) for text in part)
            empty = not tokens and any(text.rows for text in part)  # refused as it is read
            if tokens < self.seq_len and not empty:
                raise DataError(
                    f"A sixteenth of the text, {tokens:,} tokens, is held out to {purpose} on, and "
                    f"a sequence of {self.seq_len} is needed: give some "
                    f"{2 * HELD_OUT * self.seq_len:,} tokens, a smaller seq_len, or no --data "
                    "for the text that ships with headprune."
                )

    def _beyond(self, texts: Parts, window: Window, most: int) -> int:
        """Return the tokens of a sequence that shows the loss beyond a window, ``most`` at most.

        Raises:
            DataError: If the held-out text has too few.
        """
        length = min(most, *(self._tokens(part[0], most) for part in (texts.choose, texts.report)))
        if length < 2 * (window.size + window.sinks):
            raise DataError(
                f"A sixteenth of the text, {length:,} tokens, is held out to judge on, and shows "
                f"little beyond a window of {window.size:,}: give some "
                f"{2 * HELD_OUT * most:,} tokens, a smaller --context, or no --data for the text "
                "that ships with headprune."
            )
        return length

    def _tokens(self, text: Documents, needed: int) -> int:
        """Count the tokens of a text, no further than a sequence needs."""
        documents, before = text.examples().documents(), around(self.tokenizer).before
        most, count = CHARACTERS * needed, 0
        for document in documents:
            for part in tokens_of(document, self.tokenizer, before, most=most):
                count += len(part[0])
                if count >= needed:
                    return count
        return count

    def _rows(self, text: Documents, how: RowSettings) -> Dataset:
        examples = text.examples()
        if self.written is not None:
            references = references_of(examples)
            sources = [source for source, _ in examples.texts]
            ids = self.tokenizer(sources, truncation=True, verbose=False)["input_ids"]
            columns = {"input_ids": ids, "source": sources, "reference": references}
            return Dataset.from_dict(columns)
        if self._packs:
            before, after = around(self.tokenizer)
            special = len(before) + len(after) * bool(self._row.closed)
            whole = self._tokens(text, self.seq_len) + special
            how = replace(how, seq_len=min(self.seq_len, max(whole, 2)))
        return self._row.rows(how, examples)[0]

    def _outputs(self, net: PreTrainedModel, rows: Dataset, progress: Progress) -> Any:
        if self.written is not None:
            sized = (self.tokenizer, self.batch_size, self.written.most, progress)
            written = write(net, rows["source"], *sized)
            counts = COUNTED[self.written.metric].counts(written, rows["reference"])
            return np.array(counts, np.float64)
        return self._row.outputs(Pass(net, rows, self.tokenizer, self.batch_size, progress))


def _refuse_few(rows: Mapping[tuple[str, bool], Dataset]) -> None:
    counts = [sum(len(some) for part, some in rows.items() if part[1] is r) for r in (False, True)]
    if min(counts) < _ROWS // 2:
        raise DataError(
            f"An eighth of the text, {sum(counts)} rows, is held out, and {_ROWS} are needed, half "
            f"to choose and half to report on: give {_ROWS * HELD_OUT} rows or more, or no --data "
            "for the text that ships with headprune."
        )


def _some(rows: Dataset, tokens: int) -> Dataset:
    """Return rows from all over a text, evenly, with about ``tokens`` tokens."""
    mean = sum(map(len, rows["input_ids"])) / len(rows)
    count = min(len(rows), max(1, round(tokens / mean)))
    return rows.select(evenly(len(rows), count))
