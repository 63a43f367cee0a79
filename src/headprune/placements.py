"""The part of a model in memory at once: all of it, or one layer; chosen by ``placement``.

Of several processes each may hold a part of every layer (``--shard``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum

from headprune import devices
from headprune.memory import available, on_device

ROOM = 1.25  # times the weights, with room for their computations


class Placement(str, Enum):
    """The part of a model in memory at once."""

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
        asked: The value of ``placement``. Within another block, "auto" is that block's.
        say: Called with a line, where a model is run layer by layer.
    """
    before = _CHOICE.get()
    if asked is Placement.AUTO and before is not None:
        asked = before.asked
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
    """Return whether models are to be split over the processes."""
    return _SHARDS.get()


def room() -> dict[str, int]:
    """Bytes that are free on the host, "cpu", and on the device of the command, if they say so."""
    device = devices.chosen()
    found = {devices.CPU: available(), str(device): on_device(device)}
    if device.type == devices.CPU:
        found = {devices.CPU: available()}
    return {place: free for place, free in found.items() if free is not None}


def too_large(weights: int) -> str | None:
    """Name the place where a model does not fit as a whole by "auto"; None where it fits.

    Args:
        weights: Bytes of its weights, in the element type that it computes in.
    """
    return next((place for place, free in room().items() if ROOM * weights > free), None)


def by_layers(weights: int) -> bool:
    """Return whether a model is to be run layer by layer; says so.

    Args:
        weights: Bytes of its weights, in the element type that it computes in.
    """
    choice = _CHOICE.get()
    if choice is None or choice.asked is Placement.WHOLE:
        return False
    why = ""
    if choice.asked is Placement.AUTO:
        place = too_large(weights)
        if place is None:
            return False
        free = room()[place]
        why = f" ({weights / 1e9:.1f} GB of weights, and {free / 1e9:.1f} GB are free on {place})"
    choice.say(f"placement: layers{why}")
    return True
