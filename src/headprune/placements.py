"""How much of a model is in memory at once: all of it, or one layer; chosen by ``--placement``.

Of several processes each may hold a part of every layer (``--shard``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum

from headprune.devices import free_on_device
from headprune.memory import available

ROOM = 1.25  # times the weights, for what they compute


class Placement(str, Enum):
    """How much of a model is in memory at once."""

    AUTO = "auto"
    WHOLE = "whole"
    LAYERS = "layers"


@dataclass(frozen=True)
class _Asked:
    asked: Placement
    say: Callable[[str], None]


_CHOICE: ContextVar[_Asked | None] = ContextVar("placement", default=None)


@contextmanager
def placing(asked: Placement, say: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """Has models placed so for the time of a ``with`` block.

    Args:
        asked: The value of ``--placement``.
        say: Called with a line, where a model is run layer by layer.
    """
    token = _CHOICE.set(_Asked(asked, say))
    try:
        yield
    finally:
        _CHOICE.reset(token)


def asked_placement() -> Placement:
    """The one of the command that runs; outside of one, models are whole."""
    choice = _CHOICE.get()
    return Placement.WHOLE if choice is None else choice.asked


_SHARDS: ContextVar[bool] = ContextVar("shards", default=False)


@contextmanager
def sharding(asked: bool) -> Iterator[None]:
    """Has models split over the processes for the time of a ``with`` block, if asked for."""
    token = _SHARDS.set(asked)
    try:
        yield
    finally:
        _SHARDS.reset(token)


def in_shards() -> bool:
    """Whether models are to be split over the processes."""
    return _SHARDS.get()


def by_layers(weights: int) -> bool:
    """Whether a model is to be run layer by layer; says so.

    Args:
        weights: Bytes of its weights, in the element type that it computes in.
    """
    choice = _CHOICE.get()
    free = min((n for n in (available(), free_on_device()) if n is not None), default=None)
    if choice is None or choice.asked is Placement.WHOLE:
        return False
    why = ""
    if choice.asked is Placement.AUTO:
        if free is None or ROOM * weights <= free:
            return False
        why = f" ({weights / 1e9:.1f} GB of weights, and {free / 1e9:.1f} GB are free)"
    choice.say(f"placement: layers{why}")
    return True
