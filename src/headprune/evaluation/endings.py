"""Whether a causal language model predicts how rows of tokens end.

An ending is predicted if each of its tokens is the likeliest one, given those before it, which is
what greedy decoding would write. It takes one pass over the row, and none per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from headprune.evaluation.metrics import Floats
from headprune.evaluation.quality import Progress
from headprune.model.passes import logits_at


@dataclass(frozen=True)
class Ending:
    """Tokens; the ending begins at ``start``."""

    ids: list[int]
    start: int


def ending_of(tokenizer: Any, context: str, ending: str, before: Sequence[int] = ()) -> Ending:
    """A context and, after a space, its ending, in tokens; ``before`` come in front of them."""
    texts = [context, f"{context} {ending}"]
    alone, ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    same = takewhile(lambda pair: pair[0] == pair[1], zip(alone, ids, strict=False))
    return Ending([*before, *ids], len(before) + sum(1 for _ in same))


@torch.no_grad()
def endings_predicted(
    model: PreTrainedModel,
    rows: Sequence[Ending],
    batch_size: int,
    progress: Progress = lambda done, total: None,
) -> Floats:
    """Per row, 1 where its ending is predicted, and 0 where it is not.

    Args:
        model: A causal language model.
        rows: The rows; none is longer than the model takes.
        batch_size: Rows per forward pass; no result depends on it.
        progress: Called with rows done and rows in all.
    """
    by_length = sorted(range(len(rows)), key=lambda number: len(rows[number].ids))
    hits = np.zeros(len(rows))
    for start in range(0, len(rows), batch_size):
        part = by_length[start : start + batch_size]
        hits[part] = _hits(model, [rows[number] for number in part])
        progress(start + len(part), len(rows))
    return hits


def _hits(model: PreTrainedModel, rows: Sequence[Ending]) -> Floats:
    ids = pad_sequence([torch.tensor(row.ids) for row in rows], batch_first=True)
    lengths = torch.tensor([len(row.ids) for row in rows])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    first = torch.tensor([row.start for row in rows])
    places = first[:, None] + torch.arange(int((lengths - first).max()))
    within = places < lengths[:, None]
    places = places.minimum(lengths[:, None] - 1)  # of shorter endings, the last token again
    told = logits_at(model, ids, mask.long(), places - 1).argmax(-1).cpu()
    right: Tensor = (told == ids.gather(1, places)) | ~within
    return right.all(1).double().numpy()
