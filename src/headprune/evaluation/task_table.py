"""The tasks of models, one row each.

A row has the rows that a model reads, and the outputs of a pass over them. ``evaluate`` holds these
against the data, and ``compress`` against the outputs of the original.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel

from headprune.data.audio import Recordings
from headprune.data.batches import label_reader, tag_reader
from headprune.data.images import Images
from headprune.data.read import Examples
from headprune.data.sentences import by_sentence
from headprune.data.sequences import (
    answer_rows,
    tagged_rows,
    tokenized_rows,
    translation_rows,
    windows,
)
from headprune.data.tokens import refuse_beyond
from headprune.errors import DataError
from headprune.evaluation import quality
from headprune.evaluation.comparison import Numbers
from headprune.evaluation.metrics import LAST_WORDS, NEEDLES, PASSAGE_WORDS, Floats
from headprune.evaluation.quality import LOSSES, Pass, TokenLosses, position_ranges
from headprune.evaluation.tagged import ENTITIES, TAGS, names_entities, tag_columns
from headprune.model.batch import Task, most_tokens
from headprune.model.embedding import prompt_of
from headprune.model.loading import vocabulary_of

T = TypeVar("T")  # outputs of a pass
Rows = tuple[Dataset, Numbers | None]  # with the document that each begins in, of a running text
Tags = list[NDArray[np.int64]]
COSINES = "cosines"  # of the embeddings of a model and its base; see ``evaluate``
_SCORED = ("similarities", "scores")


@dataclass(frozen=True)
class RowSettings:
    """Settings of the rows of a text.

    Attributes:
        net: The model.
        tokenizer: Its tokenizer.
        seq_len: Tokens of a row, at most.
        most: Rows, at most; None for all.
        answers: Whether only the answers of chats are scored.
        judged: Whether rows have labels and the bytes of their tokens; ``compress`` needs neither.
    """

    net: PreTrainedModel
    tokenizer: Any
    seq_len: int
    most: int | None = None
    answers: bool = False
    judged: bool = True


class Truth(NamedTuple):
    """The truth that outputs are held against: rows with labels, examples, and classes.

    The config is that of the first model, whose classes number labels and outputs.
    """

    rows: Dataset
    examples: Examples | Images | Recordings
    config: PreTrainedConfig


@dataclass(frozen=True)
class Measure(Generic[T]):
    """A measure of the nearness of a model to the original, by which ``compress`` chooses.

    Attributes:
        name: Name of the number.
        higher_is_better: Its direction.
        rows: From outputs of model and original to counts, shape (sequences, counts).
        number: From such counts to the number.
    """

    name: str
    higher_is_better: bool
    rows: Callable[[T, T], Floats]
    number: Callable[[Floats], Any]


@dataclass(frozen=True)
class TaskRow(Generic[T]):
    """A task.

    Attributes:
        rows: From text to rows. Those of a running text come with their documents.
        outputs: From a pass to its outputs, in the order of the rows.
        columns: From outputs to the columns of metrics.
        names: Names of all columns that there may be.
        measure: The measure of ``compress``; None where it takes no such model.
        closed: Of a running text in sequences, whether each ends as a text; None for single texts.
    """

    rows: Callable[[RowSettings, Examples], Rows]
    outputs: Callable[[Pass], T]
    columns: Callable[[T, Truth], Mapping[str, Floats]]
    names: Callable[[Truth], tuple[str, ...]]
    measure: Measure[T] | None = None
    closed: bool | None = None


def are_pairs(examples: Examples | Images | Recordings) -> bool:
    """Return whether the examples are scored pairs of sentences."""
    return examples.labels is not None and examples.width == 2


def _windows(how: RowSettings, examples: Examples, closed: bool = False) -> Rows:
    tokenizer, known = how.tokenizer, vocabulary_of(how.net)
    if how.answers:
        some = examples.spread(how.most)
        return answer_rows(some, tokenizer, how.seq_len, known, measured=True), None
    if closed:
        refuse_beyond([tokenizer.mask_token_id], tokenizer, known)
    counted = {"closed": closed, "vocabulary": known, "measured": how.judged}
    return windows(examples, tokenizer, how.seq_len, how.most, **counted)


def _pairs(how: RowSettings, examples: Examples) -> Rows:
    some, known = examples.spread(how.most), vocabulary_of(how.net)
    of_decoder = most_tokens(how.net, sides=["decoder"])
    return translation_rows(some, how.tokenizer, how.seq_len, known, of_decoder, how.judged), None


def _labelled(how: RowSettings, examples: Examples) -> Rows:
    read_label = label_reader(how.net, examples.labels or ()) if how.judged else None
    some, known = by_sentence(examples).spread(how.most), vocabulary_of(how.net)
    return tokenized_rows(some, how.tokenizer, how.seq_len, read_label, known), None


def _tagged(how: RowSettings, examples: Examples) -> Rows:
    if not how.judged:
        return _labelled(how, examples)
    read_tags = tag_reader(how.net, examples.labels or ())
    some, known = examples.spread(how.most), vocabulary_of(how.net)
    return tagged_rows(some, how.tokenizer, how.seq_len, read_tags, known), None


def _apart(how: RowSettings, examples: Examples) -> Rows:
    """Return two rows of a pair: embeddings are of single texts."""
    some, known = by_sentence(examples).spread(how.most), vocabulary_of(how.net)
    settings: dict[str, Any] = {"apart": True, "prompt": prompt_of(how.net)}
    rows = tokenized_rows(some, how.tokenizer, how.seq_len, vocabulary=known, **settings)
    return rows, None if examples.rows_are_documents else np.zeros(len(rows), np.int64)


def _class_hits(logits: Floats, truth: Truth) -> dict[str, Floats]:
    said, true = logits.argmax(1), np.array(truth.rows["labels"])
    flags = [np.arange(logits.shape[1]) == classes[:, None] for classes in (said, true)]
    counts = np.concatenate([np.logical_and(*flags), *flags], axis=1)
    return {"hits": (said == true).astype(float), "class_counts": counts.astype(float)}


def _label_hits(logits: Floats, truth: Truth) -> dict[str, Floats]:
    said, true = logits > 0, np.array(truth.rows["labels"], np.float64)
    hits = (said == true).all(1).astype(float)
    return {"hits": hits, "label_hits": (said * true).sum(1), "labels": (said + true).sum(1)}


def _similarities(vectors: Floats, truth: Truth) -> dict[str, Floats]:
    """Return cosines and scores of scored pairs; nothing of other texts."""
    if not are_pairs(truth.examples):
        return {}
    labels = truth.examples.spread(len(vectors) // 2).labels or ()
    return _correlated((vectors[0::2] * vectors[1::2]).sum(1), labels)


def _correlated(found: Floats, labels: Any) -> dict[str, Floats]:
    try:
        scores = np.array([float(label) for label in labels])
    except ValueError as error:
        raise DataError(f"The scores of sentence pairs must be numbers ({error}).") from None
    if not np.isfinite(scores).all() or len(np.unique(scores)) < 2:
        raise DataError(
            f"The {len(scores)} scores of the examples must be finite and not all the same; "
            "a correlation is not defined otherwise."
        )
    return dict(zip(_SCORED, (found, scores), strict=True))


def _mean(rows: Floats) -> Any:
    """Return a weighted mean; rows have a sum and a weight each."""
    sums = rows.sum(-2)
    return sums[..., 0] / sums[..., 1]


def _each(values: NDArray[Any]) -> Floats:
    return np.stack([values, np.ones(len(values))], axis=1)


def _more_loss(model: TokenLosses, original: TokenLosses) -> Floats:
    return np.stack([model.nll_nats - original.nll_nats, original.tokens], axis=1)


def _same_tags(model: Tags, original: Tags) -> Floats:
    pairs = zip(model, original, strict=True)
    return np.array([((ours == theirs).sum(), len(theirs)) for ours, theirs in pairs], np.float64)


def _errors(model: Floats, original: Floats) -> Floats:
    """Squared errors, and the squared errors of the original's mean."""
    spread = original - original.mean(0)
    return np.stack([((model - original) ** 2).sum(1), (spread**2).sum(1)], axis=1)


_PERPLEXITY = Measure("perplexity ratio", False, _more_loss, lambda rows: np.exp(_mean(rows)))
TASKS: dict[Task, TaskRow[Any]] = {
    "causal-lm": TaskRow[TokenLosses](
        rows=_windows,
        outputs=quality.causal_losses,
        columns=lambda losses, _: losses.columns(),
        names=lambda truth: (
            *LOSSES,
            *(f"{n}@{part}" for part in position_ranges(truth.rows) for n in LOSSES[:2]),
            *(*LAST_WORDS, *PASSAGE_WORDS, *NEEDLES),
        ),
        measure=_PERPLEXITY,
        closed=False,
    ),
    "masked-lm": TaskRow[TokenLosses](
        rows=partial(_windows, closed=True),
        outputs=quality.masked_losses,
        columns=lambda losses, _: losses.columns(),
        names=lambda _: LOSSES,
        measure=_PERPLEXITY,
        closed=True,
    ),
    "seq2seq-lm": TaskRow[TokenLosses](
        rows=_pairs,
        outputs=quality.translation_losses,
        columns=lambda losses, _: losses.columns(),
        names=lambda _: LOSSES,
        measure=_PERPLEXITY,
    ),
    "classification": TaskRow[Floats](
        rows=_labelled,
        outputs=quality.logits,
        columns=_class_hits,
        names=lambda _: ("hits", "class_counts"),
        measure=Measure("same labels", True, lambda a, b: _each(a.argmax(1) == b.argmax(1)), _mean),
    ),
    "multi-label": TaskRow[Floats](
        rows=_labelled,
        outputs=quality.logits,
        columns=_label_hits,
        names=lambda _: ("hits", "label_hits", "labels"),
        measure=Measure(
            "same labels", True, lambda a, b: _each(((a > 0) == (b > 0)).mean(1)), _mean
        ),
    ),
    "regression": TaskRow[Floats](
        rows=_labelled,
        outputs=quality.logits,
        columns=lambda found, truth: _correlated(found[:, 0], truth.rows["labels"]),
        names=lambda _: _SCORED,
        measure=Measure("explained variance", True, _errors, lambda rows: 1 - _mean(rows)),
    ),
    "token-classification": TaskRow[Tags](
        rows=_tagged,
        outputs=quality.tags,
        columns=lambda said, truth: tag_columns(said, truth.rows, truth.config),
        names=lambda truth: (*TAGS, *ENTITIES) if names_entities(truth.config) else TAGS,
        measure=Measure("same tags", True, _same_tags, _mean),
    ),
    "features": TaskRow[Floats](
        rows=_apart,
        outputs=quality.embeddings,
        columns=_similarities,
        names=lambda truth: (*(_SCORED if are_pairs(truth.examples) else ()), COSINES),
        measure=Measure("similarity", True, lambda a, b: _each((a * b).sum(1)), _mean),
    ),
    # measured by the text that it writes
    "ctc": TaskRow[None](_pairs, lambda _: None, lambda *_: {}, lambda _: ()),
}
