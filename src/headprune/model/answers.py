"""Prompts, and whether a causal language model answers them.

An answer is right if each of its tokens is the likeliest one, given those before it, which is what
greedy decoding would write. One pass over prompt and answer tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from headprune.context import Progress
from headprune.model.passes import logits_at

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Prompt:
    """Tokens of a context and its answer, which begins at ``start``."""

    ids: list[int]
    start: int


@torch.no_grad()
def answered(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    batch_size: int,
    progress: Progress = lambda done, total: None,
) -> Floats:
    """Return, per prompt, 1 where the model gives its answer, else 0.

    Args:
        model: A causal language model.
        prompts: None longer than the model takes.
        batch_size: Prompts per forward pass; no result depends on it.
        progress: Called with prompts done and prompts in all.
    """
    by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number].ids))
    hits = np.zeros(len(prompts))
    for start in range(0, len(prompts), batch_size):
        part = by_length[start : start + batch_size]
        hits[part] = _hits(model, [prompts[number] for number in part])
        progress(start + len(part), len(prompts))
    return hits


def _hits(model: PreTrainedModel, prompts: Sequence[Prompt]) -> Floats:
    ids = pad_sequence([torch.tensor(prompt.ids) for prompt in prompts], batch_first=True)
    lengths = torch.tensor([len(prompt.ids) for prompt in prompts])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    first = torch.tensor([prompt.start for prompt in prompts])
    places = first[:, None] + torch.arange(int((lengths - first).max()))
    inside = places < lengths[:, None]
    places = places.minimum(lengths[:, None] - 1)  # of shorter answers, the last token again
    likeliest = logits_at(model, ids, mask.long(), places - 1).argmax(-1).cpu()
    right: Floats = ((likeliest == ids.gather(1, places)) | ~inside).all(1).double().numpy()
    return right
