"""Passes over one batch that begin at the first block that has changed since the pass before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from headprune.runtime.modeling_headprune import Attention


class Replay:
    """What the blocks of a model gave in one pass, to be given again instead of running them.

    A block is the outermost item of a list of modules that holds an attention module, mostly a
    layer. One that runs more than once, or whose forward is already somebody else's, always runs.

    Args:
        model: The model, in evaluation: a block gives the same for the same.
        attentions: Its attention modules.
    """

    def __init__(self, model: PreTrainedModel, attentions: Sequence[Attention]) -> None:
        self._block_of = {a.path: _block_of(a.path) for a in attentions}
        modules = dict(model.named_modules())
        self._blocks = {path: modules[path] for path in self._block_of.values()}
        self._given: dict[str, list[Any]] = {}  # in the order in which they ran

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Takes down what every block gives in the pass that runs in a ``with`` block."""
        self._given = {}

        def run(path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            self._given.setdefault(path, []).append(result)
            return result

        with ExitStack() as stack:
            for path, block in self._blocks.items():
                if "forward" not in vars(block):
                    stack.enter_context(_instead(block, partial(run, path, block.forward)))
            yield

    @contextmanager
    def from_block_of(self, attention: Attention) -> Iterator[None]:
        """Has the blocks that ran before that of a module give what they gave."""
        first = self._block_of[attention.path]
        if first not in self._given:  # nobody knows what ran before it
            yield
            return
        with ExitStack() as stack:
            for path, given in self._given.items():
                if path == first:
                    break
                if len(given) == 1:
                    stack.enter_context(_instead(self._blocks[path], partial(_again, given[0])))
            yield


def _block_of(path: str) -> str:
    """The path of the outermost item of a list on the way to a module, or that of its parent."""
    parts = path.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1] or parts)


def _again(result: Any, *_: Any, **__: Any) -> Any:
    return result


@contextmanager
def _instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Gives a module another forward, for the time of a ``with`` block."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
