"""The part of a model in memory at once: all of it, or one layer (``placement``).

Each of several processes may hold a part of every layer (``--shard``).
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
class _PlacementChoice:
    placement: Placement
    say: Callable[[str], None]


_CHOICE: ContextVar[_PlacementChoice | None] = ContextVar("placement", default=None)


@contextmanager
def placing(placement: Placement, say: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """Place models during a ``with`` block.

    Args:
        placement: The value of ``placement``. Within another block, "auto" is that block's.
        say: Called with a line where a model runs layer by layer.
    """
    before = _CHOICE.get()
    if placement is Placement.AUTO and before is not None:
        placement = before.placement
    token = _CHOICE.set(_PlacementChoice(placement, say))
    try:
        yield
    finally:
        _CHOICE.reset(token)


def asked_placement() -> Placement:
    """Return the placement of the running command; without one, models are whole."""
    choice = _CHOICE.get()
    return Placement.WHOLE if choice is None else choice.placement


_SHARDS: ContextVar[bool] = ContextVar("shards", default=False)


@contextmanager
def sharding(shard: bool) -> Iterator[None]:
    """Split models over the processes during a ``with`` block, if ``shard``."""
    token = _SHARDS.set(shard)
    try:
        yield
    finally:
        _SHARDS.reset(token)


def in_shards() -> bool:
    """Return whether models are to be split over the processes."""
    return _SHARDS.get()


def room() -> dict[str, int]:
    """Return the free bytes of the host, "cpu", and of the device, where known."""
    device = devices.chosen()
    places = {devices.CPU: available()}
    if device.type != devices.CPU:
        places[str(device)] = on_device(device)
    return {place: free for place, free in places.items() if free is not None}


def too_large(weights: int) -> str | None:
    """Return the place where a whole model does not fit; None where it fits.

    Args:
        weights: Bytes of its weights, in the element type that it computes in.
    """
    return next((place for place, free in room().items() if ROOM * weights > free), None)


def by_layers(weights: int) -> bool:
    """Return whether a model runs layer by layer, and report it.

    Args:
        weights: Bytes of its weights, in the element type that it computes in.
    """
    choice = _CHOICE.get()
    if choice is None or choice.placement is Placement.WHOLE:
        return False
    why = ""
    if choice.placement is Placement.AUTO:
        place = too_large(weights)
        if place is None:
            return False
        free = room()[place]
        why = f" ({weights / 1e9:.1f} GB of weights, and {free / 1e9:.1f} GB are free on {place})"
    choice.say(f"placement: layers{why}")
    return True
