"""The blocks of a model, run one after the other over all of a text, on hidden states kept apart.

What a block is given beside hidden states (masks, positions) comes from the model's own forward
pass over the same sequences, in which the blocks before it hand on what they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.errors import HeadpruneError
from headprune.model.batch import Batch, real_tokens, token_mask
from headprune.model.forward import run_model
from headprune.model.placement import input_device
from headprune.model.residency import blocks_of, present
from headprune.model.skeleton import Unmapped


class Stack:
    """The blocks of a model that is one stack of them.

    Args:
        net: The model.
        bf16: Whether it computes in bfloat16 (autocast).

    Raises:
        HeadpruneError: If it is made of anything else.
    """

    def __init__(self, net: PreTrainedModel, bf16: bool) -> None:
        self.net, self._bf16, self._tuple = net, bf16, False
        try:
            self.blocks = blocks_of(net)
        except Unmapped as why:
            raise HeadpruneError(f"--by-layer: {why} Leave it out.") from None
        names = {id(module): name for name, module in net.named_modules()}
        self.paths = [names[id(block)] for block in self.blocks]
        layers = getattr(net.config.get_text_config(), "num_hidden_layers", len(self.blocks))
        stacks = {path.rpartition(".")[0] for path in self.paths}
        if len(stacks) > 1 or layers != len(self.blocks):
            raise HeadpruneError(
                f"--by-layer heals a single stack of layers, each of which runs once, and "
                f"{type(net).__name__} is not one. Leave out --by-layer."
            )

    @torch.no_grad()
    def entering(self, batch: Batch) -> Tensor:
        """What enters the first block, on the CPU, shape (sequences, length, width)."""
        args, kwargs = self._given(0, batch)
        return _taken(args, kwargs).cpu()

    def run(self, number: int, states: Tensor, batch: Batch) -> Tensor:
        """What a block gives, on the device.

        Args:
            number: The block; those before it have run.
            states: What enters it.
            batch: The sequences.
        """
        with torch.no_grad():
            args, kwargs = self._given(number, batch)
        device = input_device(self.net)
        args, kwargs = _with(args, kwargs, states.to(device))
        with torch.autocast(device.type, torch.bfloat16, enabled=self._bf16):
            given = self.blocks[number].forward(*args, **kwargs)
        self._tuple = isinstance(given, tuple)
        outputs: Tensor = given[0] if self._tuple else given
        return outputs

    @torch.no_grad()
    def advance(self, number: int, states: list[Tensor], batches: Sequence[Batch]) -> None:
        """Puts what a block gives in the place of what entered it, sequences after sequences."""
        with present(self.blocks[number]):
            for at, batch in enumerate(batches):
                states[at] = self.run(number, states[at], batch).cpu()

    def _given(self, number: int, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that a block is called with."""

        def passed(*args: Any, **kwargs: Any) -> Any:
            states = _taken(args, kwargs)
            return (states,) if self._tuple else states

        def reached(*args: Any, **kwargs: Any) -> Any:
            raise _Reached(args, kwargs)

        with ExitStack() as stack:
            for block in self.blocks[:number]:
                stack.enter_context(_instead(block, passed))
            stack.enter_context(_instead(self.blocks[number], reached))
            try:
                run_model(self.net, batch)
            except _Reached as call:
                return call.arguments
        raise HeadpruneError(
            f"--by-layer: '{self.paths[number]}' does not run on this text. Leave out --by-layer."
        )


@dataclass(frozen=True)
class Streams:
    """What enters a block of the student, and what its outputs are to be, in equal batches.

    Attributes:
        batches: Those that are trained on, and then those that judge.
        states: Inputs, on the CPU, shape (sequences, length, width).
        wanted: Outputs of the original's block on the original's stream, of the same shape.
    """

    batches: Sequence[Batch]
    states: list[Tensor]
    wanted: list[Tensor]

    def variance(self, count: int) -> Tensor:
        """Of every channel that is wanted, over the real tokens of the first batches."""
        sums, tokens = torch.zeros(2, self.wanted[0].shape[-1], dtype=torch.float64), 0
        for wanted, batch in zip(self.wanted[:count], self.batches, strict=False):
            real = real_tokens(wanted, token_mask(batch, "encoder")).double()
            sums += torch.stack([real.sum(0), real.square().sum(0)])
            tokens += len(real)
        mean, square = sums / tokens
        variance: Tensor = square - mean.square()
        least = 1e-3 * float(variance.median())  # of a channel that stands still
        return variance.clamp_min(least).to(torch.float32)


class _Reached(Exception):
    """A block was called."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = args, kwargs


@contextmanager
def _instead(block: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Has a block do something else for the time of a ``with`` block."""
    own = block.__dict__.get("forward")
    block.forward = forward
    try:
        yield
    finally:
        del block.forward
        if own is not None:
            block.forward = own


def _taken(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states among the arguments of a block."""
    states: Tensor = args[0] if args else kwargs["hidden_states"]
    return states


def _with(
    args: tuple[Any, ...], kwargs: dict[str, Any], states: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with other hidden states."""
    return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})
