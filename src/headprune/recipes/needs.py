"""Where a step of a recipe would run, what memory it would take there, and whether that is free."""

from __future__ import annotations

from dataclasses import dataclass

from headprune import devices
from headprune.estimates import Estimate
from headprune.placements import Placement, asked_placement, room, too_large


@dataclass(frozen=True)
class Needs:
    """What a step needs where it runs.

    Attributes:
        device: Where it runs.
        placement: How much of a model is there at once.
        host_bytes: Memory of the host.
        device_bytes: Memory of the device; None where that is the host.
        short: What there is too little of, and what would do; empty if it fits.
    """

    device: str
    placement: Placement
    host_bytes: int
    device_bytes: int | None
    short: str


def needs_of(estimate: Estimate, places: bool) -> Needs:
    """What a step needs on the device of the command, by the placement that was asked for.

    Args:
        estimate: What it takes.
        places: Whether its command has ``--placement``.
    """
    device, asked, free = str(devices.chosen()), asked_placement(), room()
    large = asked is Placement.AUTO and too_large(estimate.weights_bytes) is not None
    by_layers = places and (large or asked is Placement.LAYERS)
    placement = Placement.LAYERS if by_layers else Placement.WHOLE
    taken = _taken(estimate, device, placement)
    lacking = _lacking(taken, free)
    return Needs(
        device=device,
        placement=placement,
        host_bytes=taken[devices.CPU],
        device_bytes=None if device == devices.CPU else taken[device],
        short="" if lacking is None else f"{lacking} {_instead(estimate, places, placement, free)}",
    )


def _taken(estimate: Estimate, device: str, placement: Placement) -> dict[str, int]:
    """Bytes by place."""
    layers = estimate.layers_bytes if placement is Placement.LAYERS else None
    computing = estimate.memory_bytes if layers is None else layers
    if device == devices.CPU:
        return {devices.CPU: computing}
    # weights are read on the host; layers come and go there
    return {devices.CPU: min(computing, estimate.weights_bytes), device: computing}


def _lacking(taken: dict[str, int], free: dict[str, int]) -> str | None:
    place = next((p for p in taken if p in free and taken[p] > free[p]), None)
    if place is None:
        return None
    return (
        f"takes about {taken[place] / 1e9:.1f} GB of memory on {place}, where "
        f"{free[place] / 1e9:.1f} GB are free."
    )


def _instead(estimate: Estimate, places: bool, placement: Placement, free: dict[str, int]) -> str:
    """What would fit."""
    device = str(devices.chosen())
    layered = [Placement.LAYERS] if places else []
    for other in (device, devices.CPU):
        for way in (Placement.WHOLE, *layered):
            taken = _taken(estimate, other, way)
            if (other, way) == (device, placement) or _lacking(taken, free) is not None:
                continue
            asked = [f"--device {other}"] if other != device else []
            asked += [f"--placement {way.value}"] if way is not placement else []
            return f"It fits with {' '.join(asked)} ({taken[other] / 1e9:.1f} GB)."
    return "No placement fits here: take a smaller batch_size or seq_len, or a larger machine."
