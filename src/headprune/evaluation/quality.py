"""Passes of a model over data, and per sequence or example the columns of its metrics.

Every value belongs to one sequence or example and does not depend on the batch it came in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, pairwise, repeat
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from headprune.context import Progress
from headprune.data.batches import masked, pairs_of
from headprune.data.sequences import refuse_empty
from headprune.data.text import Collate, lengths
from headprune.data.tokens import BYTES, around
from headprune.errors import DataError
from headprune.evaluation.metrics import Floats, in_k
from headprune.model.batch import Batch, own_padding_id, padded, padding_id, without_labels
from headprune.model.embedding import embedding
from headprune.model.placement import input_device, on_device

LOSSES = ("nll_nats", "tokens", "utf8_bytes")
_FIRST_RANGE = 256  # position


class TokenLosses(NamedTuple):
    """Per sequence: summed loss, scored tokens, and bytes of their text.

    ``by_position`` has the first two of every range of positions, as columns (``tokens@512-1k``).
    """

    nll_nats: Floats
    tokens: Floats
    utf8_bytes: Floats
    by_position: Mapping[str, Floats]

    def columns(self) -> dict[str, Floats]:
        """Return all of them by name."""
        return {**dict(zip(LOSSES, self[:3], strict=True)), **self.by_position}


def position_ranges(rows: Dataset) -> dict[str, range]:
    """Return ranges of positions by name (``512-1k``), each as long as all before it.

    They begin at 256; the last one ends with the sequence. Sequences of up to 512 tokens have none,
    nor have chats.
    """
    length = 0 if "labels" in rows.column_names else len(rows[0]["input_ids"])
    if length <= 2 * _FIRST_RANGE:
        return {}
    edges = [_FIRST_RANGE << n for n in range(length.bit_length()) if _FIRST_RANGE << n < length]
    return {f"{in_k(a)}-{in_k(b)}": range(a, b) for a, b in pairwise([*edges, length])}


@dataclass(frozen=True)
class Pass:
    """A pass of a model over rows.

    Attributes:
        net: The model.
        rows: Its rows.
        tokenizer: Its tokenizer.
        batch_size: Rows at once.
        progress: Called with rows done and rows in all.
        collate: Makes batches of images or sound; None for text.
        seed: Seed of masks; the same masks the same tokens for every model.
        order: Place of every class in the model's outputs; None for its own order.
    """

    net: PreTrainedModel
    rows: Dataset
    tokenizer: Any
    batch_size: int
    progress: Progress = lambda done, total: None
    collate: Collate | None = None
    seed: int = 0
    order: Sequence[int] | None = None

    def batches(self, collate: Collate) -> Iterator[dict[str, Any]]:
        """Yield batches on the model's device."""
        rows, count = self.rows, len(self.rows)
        rows = rows.remove_columns([BYTES]) if BYTES in rows.column_names else rows
        for start in range(0, count, self.batch_size):
            part = [rows[number] for number in range(start, min(start + self.batch_size, count))]
            yield on_device(self.net, collate(part))
            self.progress(start + len(part), count)

    def inputs(self) -> Iterator[dict[str, Any]]:
        """Yield batches without labels, of texts padded on the right."""
        if self.collate is None:
            refuse_empty(lengths(self.rows).tolist())
        return map(without_labels, self.batches(self.collate or self.padded()))

    def padded(self) -> Collate:
        """Return a function that pads texts."""
        return partial(padded, padding=padding_id(self.net.config, self.tokenizer))

    def windows(self) -> Iterator[Tensor]:
        """Yield the tokens of equally long rows."""
        count = len(self.rows)
        for start in range(0, count, self.batch_size):
            yield torch.tensor(self.rows[start : start + self.batch_size]["input_ids"])
            self.progress(min(start + self.batch_size, count), count)

    def scores(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the output of a head."""
        found: Tensor = self.net(**batch).logits.float().cpu()
        return found if self.order is None else found[..., self.order]


@torch.no_grad()
def causal_losses(run: Pass) -> TokenLosses:
    """Score every token of every sequence, given those before it in the sequence.

    Special tokens in front of a text, such as BOS, are given and not scored; without any, the first
    token of the text is given. Of rows with labels, such as chats, the labels are scored.

    Raises:
        DataError: If a loss is not finite; names the sequence.
    """
    if "labels" in run.rows.column_names:
        scores = _Scores(run.rows, 1)
        for batch in run.batches(run.padded()):
            labels = batch.pop("labels")
            scores.add(run.net(**batch, use_cache=False).logits[:, :-1], labels[:, 1:])
        return scores.losses()
    given = max(1, len(around(run.tokenizer).before))
    scores = _Scores(run.rows, given, position_ranges(run.rows))
    for ids in run.windows():
        logits = run.net(input_ids=ids.to(input_device(run.net)), use_cache=False).logits
        scores.add(logits[:, given - 1 : -1], ids[:, given:])
    return scores.losses()


@torch.no_grad()
def masked_losses(run: Pass) -> TokenLosses:
    """Score masked tokens.

    Raises:
        DataError: If a loss is not finite; names the sequence.
    """
    scores = _Scores(run.rows)
    for ids in run.windows():
        hidden, labels = masked(ids, run.tokenizer, run.seed)
        scores.add(run.net(input_ids=hidden.to(input_device(run.net))).logits, labels)
    return scores.losses()


@torch.no_grad()
def translation_losses(run: Pass) -> TokenLosses:
    """Score every token of every target, given the source and the target before it.

    Raises:
        DataError: If a loss is not finite; names the row.
    """
    scores = _Scores(run.rows)
    for batch in run.batches(run.collate or pairs_of(run.net, run.tokenizer)):
        labels = batch.pop("labels")
        scores.add(run.net(**batch, use_cache=False).logits, labels)
    return scores.losses()


@torch.no_grad()
def logits(run: Pass) -> Floats:
    """Return the outputs of a head for whole rows, shape (rows, outputs).

    Raises:
        DataError: If a row has no tokens, or its logits are not finite; names the row.
    """
    if run.collate is None and own_padding_id(run.net.config) is None:
        run = replace(run, batch_size=1)  # decoders look for the last token that is no padding
    found = torch.cat([run.scores(batch) for batch in run.inputs()])
    return _finite(found, "output for row").double().numpy()


@torch.no_grad()
def tags(run: Pass) -> list[NDArray[np.int64]]:
    """Return the number of the class of every token, an array per row.

    Raises:
        DataError: If logits are not finite; names the row.
    """
    found: list[NDArray[np.int64]] = []
    for batch in run.inputs():
        scores = _finite(run.scores(batch), "output for row")
        lengths = map(len, run.rows[len(found) : len(found) + len(scores)]["input_ids"])
        said = scores.argmax(-1).numpy()
        found += [row[:length] for row, length in zip(said, lengths, strict=True)]
    return found


@torch.no_grad()
def embeddings(run: Pass) -> Floats:
    """Return normalised embeddings, pooled as the model's files say. Shape (rows, hidden).

    Raises:
        DataError: If a row has no tokens, or its embedding is not finite; names the row.
        FamilyError: If the pooling is not supported.
    """
    vectors = [embedding(run.net, cast(Batch, batch)).cpu() for batch in run.inputs()]
    return _finite(torch.cat(vectors), "embedding of row").double().numpy()


class _Scores:
    """Sums of the sequences so far; none of their tokens.

    Args:
        rows: The sequences, perhaps with the bytes of their tokens.
        given: Tokens before the scored ones.
        ranges: Positions to sum apart, by name; all labels there are scored.
    """

    def __init__(self, rows: Dataset, given: int = 0, ranges: Mapping[str, range] = {}) -> None:
        sizes = rows[BYTES] if BYTES in rows.column_names else repeat(())
        self.sizes = (row[given:] for row in sizes)
        self.parts = {name: slice(r.start - given, r.stop - given) for name, r in ranges.items()}
        self.nll: list[Tensor] = []  # of sequences, and of their parts
        self.counts: list[tuple[int, float]] = []  # tokens and bytes of every sequence

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add sequences; a label of -100 is not scored."""
        rows = zip(logits, labels.to(logits.device), strict=True)
        # row by row: only one row of logits is in float32 at a time
        nll = [F.cross_entropy(row.float(), to, reduction="none").double() for row, to in rows]
        parts = [slice(None), *self.parts.values()]
        self.nll.append(torch.stack([row[part].sum() for row in nll for part in parts]).cpu())
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
        losses = torch.cat(self.nll).view(len(tokens), -1)
        nll, *by_part = _finite(losses, "loss of window").numpy().T
        columns: dict[str, Floats] = {}
        for (name, part), of_part in zip(self.parts.items(), by_part, strict=True):
            columns[f"nll_nats@{name}"] = of_part
            columns[f"tokens@{name}"] = np.full(len(of_part), float(part.stop - part.start))
        return TokenLosses(nll, tokens, utf8_bytes, columns)


def _finite(values: Tensor, subject: str) -> Tensor:
    damaged = (~torch.isfinite(values)).reshape(len(values), -1).any(1)
    if bool(damaged.any()):
        raise DataError(
            f"The {subject} {int(damaged.nonzero()[0])} is not finite: the model overflows in this "
            "dtype or its weights are damaged. Try --config dtype=float32."
        )
    return values
