"""Sharper attention where keys are approximated.

The components of keys that an approximation loses flatten attention, most in long contexts. A
factor of all scores makes up for a part of that; docs/experiments.md has the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor, nn

from headprune import devices
from headprune.model.heads import output_rows
from headprune.runtime.modeling_headprune import Attention

FACTORS = (1.15, 1.3, 1.45)
_NOTHING = 0.01  # nats per token


def sharpest(loss: Callable[[float], float], original: float) -> float:
    """Return the factor of scores with the least loss; the search ends where one is no better.

    Args:
        loss: From a factor to the loss on held-out text, in nats per token.
        original: The original's loss; where nothing is lost, the factor is 1.
    """
    best, least = 1.0, loss(1.0)
    if not least >= original + _NOTHING:  # nor if it is not finite
        return best
    for factor in FACTORS:
        now = loss(factor)
        if not now < least:
            break
        best, least = factor, now
    return best


@contextmanager
def larger_queries(attentions: Sequence[Attention], factor: float) -> Iterator[None]:
    """Multiply the queries of modules in a ``with`` block, where their projections give them."""
    with ExitStack() as stack:
        for attention in attentions:
            for projection in attention.projections:
                rows = output_rows(attention, projection).get("q")
                if rows is not None:
                    multiply = partial(_multiply, rows.flatten().to(devices.chosen()), factor)
                    handle = projection.module.register_forward_hook(multiply)
                    stack.callback(handle.remove)
        yield


def _multiply(
    rows: Tensor, factor: float, module: nn.Module, args: object, output: Tensor
) -> Tensor:
    output[..., rows.to(output.device)] *= factor
    return output
