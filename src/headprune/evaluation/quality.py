"""Runs a model over data and keeps, per sequence or example, what its metrics need.

Every value belongs to one sequence or example and does not depend on the batch it came in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from headprune.data.batches import masked, pairs_of
from headprune.data.tokens import around
from headprune.errors import DataError
from headprune.evaluation.recall import RecalledWords
from headprune.model.batch import Batch, own_padding_id, padding_id
from headprune.model.embedding import embedding
from headprune.model.loading import task_of
from headprune.model.placement import input_device, on_device

Progress = Callable[[int, int], None]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TokenLosses:
    """Losses of a language model.

    Attributes:
        nll_nats: Summed loss of each sequence, shape (sequences,).
        tokens: Scored tokens of each sequence.
        utf8_bytes: Bytes of their text.
    """

    COLUMNS: ClassVar = ("nll_nats", "tokens", "utf8_bytes")

    nll_nats: Floats
    tokens: Floats
    utf8_bytes: Floats

    def columns(self) -> dict[str, Floats]:
        """As metrics take them."""
        return {name: getattr(self, name) for name in self.COLUMNS}


@torch.no_grad()
def causal_losses(
    model: PreTrainedModel,
    sequences: Dataset,
    tokenizer: Any,
    batch_size: int,
    progress: Progress = lambda done, total: None,
    words: RecalledWords | None = None,
) -> TokenLosses:
    """Scores every token of every sequence, each given those before it in there.

    Those that the tokenizer puts in front of a text, such as BOS, are given and not scored; where
    there is none, the first token of the text is.

    Args:
        model: A causal language model.
        sequences: Rows of equally long ``input_ids``.
        tokenizer: Gives the text of the scored tokens, for bits per byte.
        batch_size: Windows per forward pass.
        progress: Called with sequences done and sequences in all.
        words: Counts the words that are predicted, if that is asked for.

    Raises:
        DataError: If a loss is not finite; the sequence is named.
    """
    found, given = _Scored(tokenizer), max(1, len(around(tokenizer).before))
    for ids in _batches(sequences, batch_size, progress):
        logits = model(input_ids=ids.to(input_device(model)), use_cache=False).logits
        logits, scored = logits[:, given - 1 : -1], ids[:, given:]
        found.add(logits, scored)
        if words is not None:
            words.add(logits, scored)
    return found.losses()


@torch.no_grad()
def masked_losses(
    model: PreTrainedModel,
    sequences: Dataset,
    tokenizer: Any,
    batch_size: int,
    seed: int,
    progress: Progress = lambda done, total: None,
) -> TokenLosses:
    """Scores masked tokens; the same seed masks the same tokens for every model.

    Raises:
        DataError: If a loss is not finite; the sequence is named.
    """
    found = _Scored(tokenizer)
    for ids in _batches(sequences, batch_size, progress):
        hidden, labels = masked(ids, tokenizer, seed)
        found.add(model(input_ids=hidden.to(input_device(model))).logits, labels)
    return found.losses()


@torch.no_grad()
def translation_losses(
    model: PreTrainedModel,
    rows: Dataset,
    tokenizer: Any,
    batch_size: int,
    progress: Progress = lambda done, total: None,
) -> TokenLosses:
    """Scores every token of every target, given the source and the target before it.

    Raises:
        DataError: If a loss is not finite; the row is named.
    """
    collate, found = pairs_of(model, tokenizer), _Scored(tokenizer)
    for start in range(0, len(rows), batch_size):
        part = [rows[i] for i in range(start, min(start + batch_size, len(rows)))]
        batch = on_device(model, collate(part))
        labels = batch.pop("labels")
        found.add(model(**batch, use_cache=False).logits, labels)
        progress(start + len(part), len(rows))
    return found.losses()


@torch.no_grad()
def predictions(
    model: PreTrainedModel,
    rows: Dataset,
    tokenizer: Any,
    batch_size: int,
    progress: Progress = lambda done, total: None,
) -> Floats:
    """What a head for sequences says of each row.

    That is the number of a class, shape (rows,); 0 or 1 for each label, where these do not exclude
    each other, shape (rows, labels); or numbers, shape (rows, numbers).

    Raises:
        DataError: If a row has no tokens, or its logits are not finite; the row is named.
    """
    if own_padding_id(model.config) is None:
        batch_size = 1  # decoders look for the last token that is no padding
    logits = _finite(
        torch.cat(
            [
                model(**batch).logits.float().cpu()
                for batch in _padded(model, rows, tokenizer, batch_size, progress)
            ]
        ),
        "output for row",
    )
    task = task_of(model)
    said = logits if task == "regression" else logits > 0
    return (logits.argmax(-1) if task == "classification" else said).double().numpy()


@torch.no_grad()
def embeddings(
    model: PreTrainedModel,
    rows: Dataset,
    tokenizer: Any,
    batch_size: int,
    progress: Progress = lambda done, total: None,
) -> Floats:
    """Normalised embeddings, pooled as the model's files say. Shape (rows, hidden).

    Raises:
        DataError: If a row has no tokens, or its embedding is not finite; the row is named.
        FamilyError: If the embedding is pooled as headprune cannot.
    """
    vectors = [
        embedding(model, cast(Batch, batch)).cpu()
        for batch in _padded(model, rows, tokenizer, batch_size, progress)
    ]
    return _finite(torch.cat(vectors), "embedding of row").double().numpy()


def _batches(sequences: Dataset, size: int, progress: Progress) -> Iterator[Tensor]:
    for start in range(0, len(sequences), size):
        yield torch.tensor(sequences[start : start + size]["input_ids"])
        progress(min(start + size, len(sequences)), len(sequences))


def _padded(
    model: PreTrainedModel, rows: Dataset, tokenizer: Any, size: int, progress: Progress
) -> Iterator[dict[str, Tensor]]:
    """Batches padded on the right, on the model's device, without the labels."""
    padding = {"input_ids": padding_id(model.config, tokenizer)}
    inputs = [name for name in rows.column_names if name != "labels"]
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        lengths = list(map(len, part["input_ids"]))
        if 0 in lengths:
            raise DataError(
                f"Row {start + lengths.index(0)} (counted from 0; a sentence pair may be two rows) "
                "has no tokens. Leave empty texts out."
            )
        columns = {name: [torch.tensor(ids) for ids in part[name]] for name in inputs}
        yield {
            name: pad_sequence(ids, batch_first=True, padding_value=padding.get(name, 0)).to(
                input_device(model)
            )
            for name, ids in columns.items()
        }
        progress(min(start + size, len(rows)), len(rows))


def _summed(logits: Tensor, labels: Tensor) -> Tensor:
    """Loss per row; row by row, so that only one row of logits is held in float32."""
    rows = zip(logits, labels, strict=True)
    return torch.stack(
        [F.cross_entropy(row.float(), target, reduction="sum").double() for row, target in rows]
    ).cpu()


class _Scored:
    """Sums of the sequences so far; of their tokens nothing is kept."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # the names of these are no text; an unknown token stands for some
        around = ("bos", "eos", "pad", "sep", "cls", "mask")
        self.unread = {getattr(tokenizer, f"{name}_token_id", None) for name in around}
        self.nll: list[Tensor] = []
        self.counts: list[tuple[int, int]] = []  # tokens and bytes of every sequence

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Adds sequences; a label of -100 is not scored."""
        self.nll.append(_summed(logits, labels.to(logits.device)))
        for row in labels.cpu():
            scored = row[row != -100].tolist()
            text = self.tokenizer.decode([token for token in scored if token not in self.unread])
            self.counts.append((len(scored), len(text.encode())))

    def losses(self) -> TokenLosses:
        """All sequences.

        Raises:
            DataError: If a loss is not finite, or there is nothing that could be scored.
        """
        tokens, utf8_bytes = np.array(self.counts, dtype=np.float64).T
        if not tokens.any():
            raise DataError(
                f"There is no token to score in {len(tokens)} windows: those that are no special "
                "tokens can be masked, and one with others before it can be predicted. Give other "
                "text, or a larger --seq-len."
            )
        return TokenLosses(
            _finite(torch.cat(self.nll), "loss of window").numpy(), tokens, utf8_bytes
        )


def _finite(values: Tensor, what: str) -> Tensor:
    """Passes values on, first dimension rows, if all of them are finite."""
    damaged = (~torch.isfinite(values)).reshape(len(values), -1).any(1)
    if bool(damaged.any()):
        raise DataError(
            f"The {what} {int(damaged.nonzero()[0])} is not finite: the model overflows in this "
            "dtype or its weights are damaged. Try --config dtype=float32."
        )
    return values
