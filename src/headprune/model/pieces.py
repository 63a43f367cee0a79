"""Calibration on all sequences at once, of which a module sees a few at a time.

A norm, an MLP or experts make of a sequence what they would make of it alone. Where such a module
takes hidden states and returns them (in Llama and its like, GPT-2, T5), it runs on a few sequences
after the other, so that its inner states, several times as wide as the layer, are in memory for
those only.

So does attention up to its output projection, which then gets all sequences together, where the
module does nothing more and is given nothing that could be told apart wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.model.residency import blocks_of
from headprune.model.skeleton import Unmapped
from headprune.runtime.modeling_headprune import Attention, input_dim, width

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


# of an attention module, what has a row per sequence, or one for all: its name and dimensions
_PER_SEQUENCE = {
    "hidden_states": (3,),
    "attention_mask": (2, 4),
    "position_ids": (2,),
    "position_embeddings": (3,),
}


class _Apart(Exception):
    """What an attention module is given cannot be told apart by sequence for certain."""


def entering_output(
    forward: Callable[..., Any],
    projection: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Tensor, tuple[None, ...] | None] | None:
    """What enters W_O, of an attention module that runs on a few sequences after the other.

    Args:
        forward: The forward pass of the module.
        projection: Its output projection, which is not computed.
        args: What the module is given: hidden states of shape (sequences, length, width) first.
        kwargs: What it is given by name.

    Returns:
        The inputs of the projection, shape (sequences, length, heads * head_dim), and what the
        module returns behind the outputs, or None if these alone. Nothing where the module has to
        see all sequences together: if it does more with the outputs, or is given what may belong
        to all.
    """
    named = {**kwargs, "hidden_states": args[0]} if args else {**kwargs}
    states = named.get("hidden_states")
    if len(args) > 1 or not isinstance(states, Tensor) or states.dim() != 3:
        return None
    rows, length = states.shape[:2]
    size = width(projection, 1 - input_dim(projection))
    inputs: Tensor | None = None
    result: Any = None
    for start in range(0, rows, step := max(1, TOKENS // length)):
        part = slice(start, min(start + step, rows))
        try:
            given = {name: _of_part(name, each, states, part) for name, each in named.items()}
        except _Apart:
            return None
        with _uncomputed(projection, size) as calls:
            result = forward(**given)
        if len(calls) != 1 or not _returns_only(result, calls[0][1]):
            return None
        x = calls[0][0]
        if x.shape[:2] != (part.stop - start, length):
            return None
        if inputs is None:
            inputs = x.new_empty(rows, *x.shape[1:])
        inputs[part] = x
    if inputs is None:
        return None
    return inputs, (None,) * (len(result) - 1) if isinstance(result, tuple) else None


@contextmanager
def _uncomputed(projection: nn.Module, size: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Has a projection give zeros, and notes what it was given and what it gave."""
    calls: list[tuple[Tensor, Tensor]] = []

    def forward(x: Tensor) -> Tensor:
        calls.append((x, x.new_zeros(*x.shape[:-1], size)))
        return calls[-1][1]

    projection.forward = forward
    try:
        yield calls
    finally:
        del projection.forward


def _of_part(name: str, value: Any, states: Tensor, part: slice) -> Any:
    """What some sequences are given of an argument.

    Raises:
        _Apart: If that cannot be told for certain.
    """
    if name == "position_embeddings" and isinstance(value, tuple):
        return tuple(_of_part(name, each, states, part) for each in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    rows, length = states.shape[:2]
    known = isinstance(value, Tensor) and value.dim() in _PER_SEQUENCE.get(name, ())
    if not known or length not in (value.shape[1], value.shape[-1]) or len(value) not in (1, rows):
        raise _Apart
    if value.shape == (length, length) and length > 1:  # rows may be tokens
        raise _Apart
    return value if len(value) == 1 else value[part]


def _returns_only(result: Any, outputs: Tensor) -> bool:
    """Whether a module returned what its output projection gave, untouched, and nothing more."""
    first, *others = result if isinstance(result, tuple) else (result,)
    return first is outputs and not outputs._version and all(other is None for other in others)
