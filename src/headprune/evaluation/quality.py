"""Passes of a model over data, and per sequence or example the columns of its metrics.

Every value belongs to one sequence or example and does not depend on the batch it came in.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import compress, repeat
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from headprune.context import Progress
from headprune.data.batches import masked, pairs_of
from headprune.data.sequences import refuse_empty
from headprune.data.text import Collate, lengths
from headprune.data.tokens import BYTES, around
from headprune.errors import DataError
from headprune.model.batch import Batch, own_padding_id, padded, padding_id, without_labels
from headprune.model.embedding import embedding
from headprune.model.loading import task_of
from headprune.model.placement import input_device, on_device

Floats = NDArray[np.float64]


class TokenLosses(NamedTuple):
    """Per sequence: summed loss, scored tokens, and bytes of their text."""

    nll_nats: Floats
    tokens: Floats
    utf8_bytes: Floats


@torch.no_grad()
def causal_losses(
    model: PreTrainedModel,
    sequences: Dataset,
    tokenizer: Any,
    batch_size: int,
    progress: Progress = lambda done, total: None,
) -> TokenLosses:
    """Score every token of every sequence, given those before it in the sequence.

    Special tokens in front of a text, such as BOS, are given and not scored; without any, the first
    token of the text is given.

    Args:
        model: A causal language model.
        sequences: Rows of equally long ``input_ids``.
        tokenizer: Its special tokens in front of a text are given.
        batch_size: Windows per forward pass.
        progress: Called with sequences done and sequences in all.

    Raises:
        DataError: If a loss is not finite; names the sequence.
    """
    given = max(1, len(around(tokenizer).before))
    scores = _Scores(sequences, given)
    for ids in _batches(sequences, batch_size, progress):
        logits = model(input_ids=ids.to(input_device(model)), use_cache=False).logits
        scores.add(logits[:, given - 1 : -1], ids[:, given:])
    return scores.losses()


@torch.no_grad()
def masked_losses(
    model: PreTrainedModel,
    sequences: Dataset,
    tokenizer: Any,
    batch_size: int,
    seed: int,
    progress: Progress = lambda done, total: None,
) -> TokenLosses:
    """Score masked tokens; the same seed masks the same tokens for every model.

    Raises:
        DataError: If a loss is not finite; names the sequence.
    """
    scores = _Scores(sequences)
    for ids in _batches(sequences, batch_size, progress):
        hidden, labels = masked(ids, tokenizer, seed)
        scores.add(model(input_ids=hidden.to(input_device(model))).logits, labels)
    return scores.losses()


@torch.no_grad()
def translation_losses(
    model: PreTrainedModel,
    rows: Dataset,
    tokenizer: Any,
    batch_size: int,
    progress: Progress = lambda done, total: None,
    collate: Collate | None = None,
) -> TokenLosses:
    """Score every token of every target, given the source and the target before it.

    ``collate`` makes batches of sound.

    Raises:
        DataError: If a loss is not finite; names the row.
    """
    collate, scores = collate or pairs_of(model, tokenizer), _Scores(rows)
    inputs = _without_bytes(rows)
    for start in range(0, len(rows), batch_size):
        part = [inputs[i] for i in range(start, min(start + batch_size, len(rows)))]
        batch = on_device(model, collate(part))
        labels = batch.pop("labels")
        scores.add(model(**batch, use_cache=False).logits, labels)
        progress(start + len(part), len(rows))
    return scores.losses()


@torch.no_grad()
def answer_losses(
    model: PreTrainedModel,
    rows: Dataset,
    tokenizer: Any,
    batch_size: int,
    progress: Progress = lambda done, total: None,
) -> TokenLosses:
    """Score the answers of chats, given all before each token.

    Raises:
        DataError: If a loss is not finite; names the row.
    """
    scores, labels = _Scores(rows, 1), iter(rows["labels"])
    for batch in _padded(model, _without_bytes(rows), tokenizer, batch_size, progress):
        logits = model(**batch, use_cache=False).logits[:, :-1]
        some = [torch.tensor(next(labels)) for _ in range(len(logits))]
        scores.add(logits, pad_sequence(some, batch_first=True, padding_value=-100)[:, 1:])
    return scores.losses()


@torch.no_grad()
def predictions(
    model: PreTrainedModel,
    rows: Dataset,
    tokenizer: Any,
    batch_size: int,
    progress: Progress = lambda done, total: None,
    collate: Collate | None = None,
) -> Floats:
    """Return the predictions of a head for sequences, or for images with a ``collate`` of theirs.

    Classes as numbers, shape (rows,); flags of labels that do not exclude each other, shape
    (rows, labels); or a regression's numbers, shape (rows, numbers).

    Raises:
        DataError: If a row has no tokens, or its logits are not finite; names the row.
    """
    if collate is not None:
        batches = _collated(model, rows, collate, batch_size, progress)
    else:
        if own_padding_id(model.config) is None:
            batch_size = 1  # decoders look for the last token that is no padding
        batches = _padded(model, rows, tokenizer, batch_size, progress)
    logits = torch.cat([model(**batch).logits.float().cpu() for batch in batches])
    logits, task = _finite(logits, "output for row"), task_of(model)
    if task == "classification":
        return logits.argmax(-1).double().numpy()
    return (logits if task == "regression" else logits > 0).double().numpy()


@torch.no_grad()
def tags(
    model: PreTrainedModel,
    rows: Dataset,
    tokenizer: Any,
    batch_size: int,
    progress: Progress = lambda done, total: None,
) -> list[NDArray[np.int64]]:
    """Return the number of the class of every token, an array per row.

    Raises:
        DataError: If logits are not finite; names the row.
    """
    found: list[NDArray[np.int64]] = []
    for batch in _padded(model, rows, tokenizer, batch_size, progress):
        logits = _finite(model(**batch).logits.float().cpu(), "output for row")
        lengths = map(len, rows[len(found) : len(found) + len(logits)]["input_ids"])
        said = logits.argmax(-1).numpy()
        found += [row[:length] for row, length in zip(said, lengths, strict=True)]
    return found


@torch.no_grad()
def embeddings(
    model: PreTrainedModel,
    rows: Dataset,
    tokenizer: Any,
    batch_size: int,
    progress: Progress = lambda done, total: None,
    collate: Collate | None = None,
) -> Floats:
    """Return normalised embeddings, pooled as the model's files say. Shape (rows, hidden).

    ``collate`` makes batches of images.

    Raises:
        DataError: If a row has no tokens, or its embedding is not finite; names the row.
        FamilyError: If the pooling is not supported.
    """
    if collate is not None:
        batches = _collated(model, rows, collate, batch_size, progress)
    else:
        batches = _padded(model, rows, tokenizer, batch_size, progress)
    vectors = [embedding(model, cast(Batch, batch)).cpu() for batch in batches]
    return _finite(torch.cat(vectors), "embedding of row").double().numpy()


def _batches(sequences: Dataset, size: int, progress: Progress) -> Iterator[Tensor]:
    for start in range(0, len(sequences), size):
        yield torch.tensor(sequences[start : start + size]["input_ids"])
        progress(min(start + size, len(sequences)), len(sequences))


def _without_bytes(rows: Dataset) -> Dataset:
    return rows.remove_columns([BYTES]) if BYTES in rows.column_names else rows


def _collated(
    model: PreTrainedModel, rows: Dataset, collate: Collate, size: int, progress: Progress
) -> Iterator[dict[str, Tensor]]:
    for start in range(0, len(rows), size):
        part = [rows[number] for number in range(start, min(start + size, len(rows)))]
        yield on_device(model, without_labels(collate(part)))
        progress(start + len(part), len(rows))


def _padded(
    model: PreTrainedModel, rows: Dataset, tokenizer: Any, size: int, progress: Progress
) -> Iterator[dict[str, Tensor]]:
    """Yield batches without labels, padded on the right, on the model's device."""
    refuse_empty(lengths(rows).tolist())
    collate = partial(padded, padding=padding_id(model.config, tokenizer))
    return _collated(model, rows, collate, size, progress)


class _Scores:
    """Sums of the sequences so far; none of their tokens.

    Args:
        rows: The sequences, perhaps with the bytes of their tokens.
        given: Tokens before the scored ones.
    """

    def __init__(self, rows: Dataset, given: int = 0) -> None:
        sizes = rows[BYTES] if BYTES in rows.column_names else repeat(())
        self.sizes = (row[given:] for row in sizes)
        self.nll: list[Tensor] = []
        self.counts: list[tuple[int, float]] = []  # tokens and bytes of every sequence

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add sequences; a label of -100 is not scored."""
        rows = zip(logits, labels.to(logits.device), strict=True)
        # row by row: only one row of logits is in float32 at a time
        nll = [F.cross_entropy(row.float(), to, reduction="sum").double() for row, to in rows]
        self.nll.append(torch.stack(nll).cpu())
        for row, sizes in zip((labels != -100).tolist(), self.sizes, strict=False):
            self.counts.append((sum(row), sum(compress(sizes, row))))

    def losses(self) -> TokenLosses:
        """Return all sequences.

        Raises:
            DataError: If a loss is not finite, or no token could be scored.
        """
        tokens, utf8_bytes = np.array(self.counts, dtype=np.float64).T
        if not tokens.any():
            raise DataError(
                f"There is no token to score in {len(tokens)} windows: a masked token must be an "
                "ordinary one, and a predicted one needs others before it. Give other text, or a "
                "larger --seq-len."
            )
        nll = _finite(torch.cat(self.nll), "loss of window").numpy()
        return TokenLosses(nll, tokens, utf8_bytes)


def _finite(values: Tensor, subject: str) -> Tensor:
    damaged = (~torch.isfinite(values)).reshape(len(values), -1).any(1)
    if bool(damaged.any()):
        raise DataError(
            f"The {subject} {int(damaged.nonzero()[0])} is not finite: the model overflows in this "
            "dtype or its weights are damaged. Try --config dtype=float32."
        )
    return values
