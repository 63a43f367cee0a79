"""Two streams through one forward pass: the original model, and the model as it is being changed.

    sequences of the batch    0 ... n-1    n ... 2n-1
    stream                    original     changed

Every sequence is in the batch twice, and modules change in the order they run. One that is reached
finds in the first half what the original makes of the text up to it, and in the second what the
changed layers before it make; so later layers make up for earlier ones, and of a layer nothing is
kept once it is passed.

Most projections have to compute one stream only: what they give in the other is known, or nobody
reads it. Hooks hand them the half that counts, and put the other beside what they give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.errors import PlanError
from headprune.model.batch import Batch
from headprune.model.forward import run_model
from headprune.model.pieces import entering_output, in_pieces
from headprune.runtime.modeling_headprune import Attention


class Stream(Enum):
    """One half of a batch in which every sequence is twice."""

    ORIGINAL = 0
    CHANGED = 1

    def of(self, x: Tensor) -> Tensor:
        """The half of a tensor that belongs to the stream."""
        return x.chunk(2)[self.value]


@dataclass(frozen=True)
class OneStream:
    """What a projection is to compute, of one stream.

    Attributes:
        stream: The stream.
        inputs: What the projection is given, shape (sequences, length, width).
        other: What it gives in the other stream; None for zeros, where nobody reads it.
    """

    stream: Stream
    inputs: Tensor
    other: Tensor | None = None

    def beside(self, outputs: Tensor) -> Tensor:
        """The outputs of both streams."""
        other = torch.zeros_like(outputs) if self.other is None else self.other
        halves = [outputs, other] if self.stream is Stream.ORIGINAL else [other, outputs]
        return torch.cat(halves)


class RunsTwice(PlanError):
    """A module runs more than once, so that no one place has its statistics."""


class Order:
    """The modules that a pass has come by, each of which it may come by once."""

    def __init__(self) -> None:
        self._reached: set[str] = set()

    def reach(self, attention: Attention) -> None:
        """Takes down that a module runs.

        Raises:
            RunsTwice: If it ran before.
        """
        if attention.path in self._reached:
            raise RunsTwice(
                f"'{attention.path}' runs in more than one layer, so there is no one place to "
                "take its statistics from."
            )
        self._reached.add(attention.path)


@contextmanager
def entering(
    projection: nn.Module, enter: Callable[[Tensor], Tensor | OneStream]
) -> Iterator[None]:
    """Has ``enter`` say what a projection computes, for the time of a ``with`` block.

    Args:
        projection: The projection.
        enter: From what would enter it to what does: in both streams, or in one.
    """
    waiting: list[OneStream] = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        given = enter(args[0])
        if isinstance(given, OneStream):
            waiting.append(given)
            given = given.inputs
        return given, *args[1:]

    def after(module: nn.Module, args: Any, outputs: Tensor) -> Tensor:
        return waiting.pop().beside(outputs) if waiting else outputs

    handles = [
        projection.register_forward_pre_hook(before),
        projection.register_forward_hook(after),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def in_sequence(
    model: PreTrainedModel,
    attentions: Sequence[Attention],
    batch: Batch,
    enter: Callable[[Attention, Tensor], Tensor | OneStream],
) -> None:
    """One forward pass in which every output projection asks what to compute, as it is reached.

    Args:
        model: The model.
        attentions: The modules.
        batch: All sequences at once; each twice, if ``enter`` tells streams apart.
        enter: From a module and what would enter its output projection to what does.

    Raises:
        RunsTwice: If a module runs more than once.
    """
    order = Order()

    def once(attention: Attention, x: Tensor) -> Tensor | OneStream:
        order.reach(attention)
        return enter(attention, x)

    with ExitStack() as stack:
        for attention in attentions:
            if attention.query_heads:
                stack.enter_context(_gathering(attention, partial(once, attention)))
        stack.enter_context(in_pieces(model, attentions))
        stack.enter_context(torch.no_grad())
        run_model(model, batch)


@contextmanager
def _gathering(
    attention: Attention, enter: Callable[[Tensor], Tensor | OneStream]
) -> Iterator[None]:
    """Has ``enter`` say what the output projection of all sequences computes.

    The attention before it runs on a few sequences after the other, where that is the same.
    """
    module, projection = attention.module, attention.output_projection
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        gathered = entering_output(forward, projection, args, kwargs)
        if gathered is None:
            with entering(projection, enter):
                return forward(*args, **kwargs)
        inputs, others = gathered
        given = enter(inputs)
        del gathered, inputs  # which are of both streams, and would stay
        if isinstance(given, OneStream):
            outputs = given.beside(projection(given.inputs))
        else:
            outputs = projection(given)
        return outputs if others is None else (outputs, *others)

    patched = "forward" in vars(module) or "forward" in vars(projection)
    if patched or projection not in set(module.modules()):
        with entering(projection, enter):
            yield
        return
    module.forward = run
    try:
        yield
    finally:
        del module.forward
