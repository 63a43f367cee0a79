"""Calibration on all sequences at once, in which modules beside attention see a few at a time.

A norm, an MLP or experts make of a sequence what they would make of it alone. Where such a module
takes hidden states and returns them (in Llama and its like, GPT-2, T5), it runs on a few sequences
after the other, so that its inner states, several times as wide as the layer, are in memory for
those only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.model.residency import blocks_of
from headprune.model.skeleton import Unmapped
from headprune.runtime.modeling_headprune import Attention

TOKENS = 2048  # at a time; a longer sequence runs alone


@contextmanager
def in_pieces(model: PreTrainedModel, attentions: Sequence[Attention]) -> Iterator[None]:
    """Has what lies beside attention run on some sequences at a time, in a ``with`` block.

    Args:
        model: The model. One that does not name its layers runs unchanged.
        attentions: Its attention modules, in which all sequences stay together.
    """
    watched = {a.module for a in attentions} | {p.module for a in attentions for p in a.projections}
    blocks: list[nn.Module] = []
    with suppress(Unmapped):
        blocks = blocks_of(model)
    found = dict.fromkeys(
        module for block in blocks if block not in watched for module in _beside(block, watched)
    )
    with ExitStack() as stack:
        for module in found:
            module.forward = partial(_piecewise, module.forward)
            stack.callback(delattr, module, "forward")
        yield


def _beside(module: nn.Module, watched: Set[nn.Module]) -> Iterator[nn.Module]:
    """The largest modules inside of one that have weights and hold no part of attention."""
    for child in module.children():
        if not watched.isdisjoint(child.modules()):
            if child not in watched:
                yield from _beside(child, watched)
        elif "forward" not in vars(child) and next(child.parameters(), None) is not None:
            yield child


def _piecewise(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 1 or not isinstance(args[0], Tensor) or args[0].dim() != 3:
        return forward(*args, **kwargs)
    states = args[0]
    pieces = states.split(max(1, TOKENS // states.shape[1]))
    if len(pieces) == 1:
        return forward(states)
    outputs: Tensor | None = None
    for number, piece in enumerate(pieces):
        made = forward(piece)
        if not isinstance(made, Tensor) or made.shape[:2] != piece.shape[:2]:
            return forward(states)  # it returns more than states, such as the scores of experts
        if outputs is None:
            outputs = made.new_empty(len(states), *made.shape[1:])
        start = number * len(pieces[0])
        outputs[start : start + len(piece)] = made
    return outputs
