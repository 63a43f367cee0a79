"""Sharper attention where keys are approximated.

The components of keys that an approximation loses flatten attention, most in long contexts. A
factor of all scores makes up for a part of that; docs/experiments.md has the numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from headprune.data.text import Sequences
from headprune.model.placement import on_device

FACTORS = (1.15, 1.3, 1.45)
_NOTHING = 0.01  # nats per token


def sharpest(loss: Callable[[float], float], original: float) -> float:
    """Return the factor of scores with the least loss; the search ends where one is no better.

    Args:
        loss: From a factor to the loss on held-out text, in nats per token.
        original: The original's loss; where nothing is lost, the factor is 1.
    """
    best, least = 1.0, loss(1.0)
    if least < original + _NOTHING:
        return best
    for factor in FACTORS:
        now = loss(factor)
        if now >= least:
            break
        best, least = factor, now
    return best


@torch.no_grad()
def mean_loss(net: PreTrainedModel, text: Sequences) -> float:
    """Return the mean loss of a language model over batches of a text, in nats per token."""
    batches = [{"labels": batch["input_ids"], **batch} for batch in text.batches()]
    losses = [float(net(**on_device(net, batch)).loss) for batch in batches]
    return sum(losses) / len(losses)
