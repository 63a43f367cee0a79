"""Runs a model over data and keeps, per window or example, what its metrics need.

Every value belongs to one window or example and does not depend on the batch it came in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from headprune.data.windows import masked
from headprune.errors import DataError

Progress = Callable[[int, int], None]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TokenLosses:
    """Losses of a language model.

    Attributes:
        nll_nats: Summed loss of each window, shape (windows,).
        tokens: Scored tokens of each window.
        utf8_bytes: Bytes of their text.
    """

    nll_nats: Floats
    tokens: Floats
    utf8_bytes: Floats


@torch.no_grad()
def causal_losses(
    model: PreTrainedModel,
    windows: Dataset,
    tokenizer: Any,
    batch_size: int,
    progress: Progress = lambda done, total: None,
) -> TokenLosses:
    """Scores every token of every window but the first, each given those before it in its window.

    Args:
        model: A causal language model.
        windows: Rows of equally long ``input_ids``.
        tokenizer: Gives the text of the scored tokens, for bits per byte.
        batch_size: Windows per forward pass.
        progress: Called with windows done and windows in all.

    Raises:
        DataError: If a loss is not finite; the window is named.
    """
    losses = []
    for ids in _batches(windows, batch_size, progress):
        logits = model(input_ids=ids.to(model.device), use_cache=False).logits[:, :-1]
        losses.append(_summed(logits, ids[:, 1:].to(model.device)))
    scored = [row[1:] for row in windows["input_ids"]]
    return _token_losses(losses, scored, tokenizer)


@torch.no_grad()
def masked_losses(
    model: PreTrainedModel,
    windows: Dataset,
    tokenizer: Any,
    batch_size: int,
    seed: int,
    progress: Progress = lambda done, total: None,
) -> TokenLosses:
    """Scores masked tokens; the same seed masks the same tokens for every model.

    Raises:
        DataError: If a loss is not finite; the window is named.
    """
    losses, scored = [], []
    for ids in _batches(windows, batch_size, progress):
        hidden, labels = masked(ids, tokenizer, seed)
        logits = model(input_ids=hidden.to(model.device)).logits
        losses.append(_summed(logits, labels.to(model.device)))
        scored += [row[row != -100].tolist() for row in labels]
    return _token_losses(losses, scored, tokenizer)


@torch.no_grad()
def predicted_labels(
    model: PreTrainedModel,
    rows: Dataset,
    tokenizer: Any,
    batch_size: int,
    progress: Progress = lambda done, total: None,
) -> Floats:
    """The label id that a classifier gives each row."""
    labels = []
    for batch in _padded(rows, tokenizer, batch_size, progress):
        batch.pop("labels", None)
        labels.append(model(**_on(model, batch)).logits.argmax(-1).cpu())
    return torch.cat(labels).double().numpy()


@torch.no_grad()
def embeddings(
    model: PreTrainedModel,
    rows: Dataset,
    tokenizer: Any,
    batch_size: int,
    progress: Progress = lambda done, total: None,
) -> Floats:
    """Mean of the last hidden states over real tokens, normalised. Shape (rows, hidden)."""
    vectors = []
    for batch in _padded(rows, tokenizer, batch_size, progress):
        batch.pop("labels", None)
        states = model(**_on(model, batch)).last_hidden_state.float().cpu()
        mask = batch["attention_mask"][..., None].float()
        vectors.append(F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(vectors).double().numpy()


def _batches(windows: Dataset, size: int, progress: Progress) -> Iterator[Tensor]:
    for start in range(0, len(windows), size):
        yield torch.tensor(windows[start : start + size]["input_ids"])
        progress(min(start + size, len(windows)), len(windows))


def _padded(
    rows: Dataset, tokenizer: Any, size: int, progress: Progress
) -> Iterator[dict[str, Tensor]]:
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        yield dict(tokenizer.pad(part, padding_side="right", return_tensors="pt"))
        progress(min(start + size, len(rows)), len(rows))


def _on(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(model.device) for name, value in batch.items()}


def _summed(logits: Tensor, labels: Tensor) -> Tensor:
    """Loss per row; row by row, so that only one row of logits is held in float32."""
    rows = zip(logits, labels, strict=True)
    return torch.stack(
        [F.cross_entropy(row.float(), target, reduction="sum").double() for row, target in rows]
    ).cpu()


def _token_losses(losses: list[Tensor], scored: list[list[int]], tokenizer: Any) -> TokenLosses:
    nll = torch.cat(losses)
    if not bool(torch.isfinite(nll).all()):
        window = int((~torch.isfinite(nll)).nonzero()[0])
        raise DataError(
            f"The loss of window {window} is not finite: the model overflows in this dtype or its "
            "weights are damaged. Try --dtype float32."
        )
    return TokenLosses(
        nll.numpy(),
        np.array([len(row) for row in scored], dtype=np.float64),
        np.array([len(tokenizer.decode(row).encode()) for row in scored], dtype=np.float64),
    )
