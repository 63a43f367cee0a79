"""Prompts, and whether a causal language model answers them.

An answer is right if each of its tokens is the likeliest one, given those before it, which is what
greedy decoding would write. One pass over prompt and answer tells. The loss of the answer tells
more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from headprune.context import Progress
from headprune.model.passes import TOKENS, logits_at

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Prompt:
    """Tokens of a context and its answer, which begins at ``start``."""

    ids: list[int]
    start: int


class Answers(NamedTuple):
    """Per prompt, 1 where the model gives its answer, else 0; and the mean loss of its tokens."""

    hits: Floats
    nats: Floats


@torch.no_grad()
def answered(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    batch_size: int,
    progress: Progress = lambda done, total: None,
) -> Answers:
    """Return whether a model gives the answers, and their loss.

    Args:
        model: A causal language model.
        prompts: None longer than the model takes.
        batch_size: Prompts per forward pass, of long ones fewer; no result depends on it.
        progress: Called with prompts done and prompts in all.
    """
    rest = sorted(range(len(prompts)), key=lambda number: -len(prompts[number].ids))
    result = Answers(np.zeros(len(prompts)), np.zeros(len(prompts)))
    while rest:
        count = min(batch_size, max(1, TOKENS // len(prompts[rest[0]].ids)))
        part, rest = rest[:count], rest[count:]
        scored = _scored(model, [prompts[number] for number in part])
        result.hits[part], result.nats[part] = scored
        progress(len(prompts) - len(rest), len(prompts))
    return result


def _scored(model: PreTrainedModel, prompts: Sequence[Prompt]) -> Answers:
    ids = pad_sequence([torch.tensor(prompt.ids) for prompt in prompts], batch_first=True)
    lengths = torch.tensor([len(prompt.ids) for prompt in prompts])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    first = torch.tensor([prompt.start for prompt in prompts])
    places = first[:, None] + torch.arange(int((lengths - first).max()))
    inside = places < lengths[:, None]
    places = places.minimum(lengths[:, None] - 1)  # of shorter answers, the last token again
    wanted = ids.gather(1, places)
    logits = logits_at(model, ids, mask.long(), places - 1).float().cpu()
    right = ((logits.argmax(-1) == wanted) | ~inside).all(1).double()
    losses = F.cross_entropy(logits.transpose(1, 2), wanted, reduction="none").double()
    nats = losses.masked_fill(~inside, 0).sum(1) / inside.sum(1)
    return Answers(right.numpy(), nats.numpy())
