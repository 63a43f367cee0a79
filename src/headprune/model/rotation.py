"""Which rotary embedding stands between an attention module's projections and its scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from headprune.tensors.rotary import RotaryPairs, Rotation

_AGREES = 1e-3  # relative: a rotary embedding other than the one assumed is off by order 1


def found_rotation(
    projected: Mapping[str, Tensor], scored: Mapping[str, Tensor], position_embeddings: Any
) -> tuple[Rotation | None, float | None]:
    """The rotary embedding that leads from the projections to the scores, and a factor of queries.

    Found by trying, so that no table has to say how a family pairs coordinates: what is right
    agrees to rounding.

    Args:
        projected: What the projections "q" and "k" give, in float32; shape (sequences, heads,
            length, head_dim).
        scored: The same as it enters the scores, in the model's element type.
        position_embeddings: What the module was given of that name: cosines and sines, if any.

    Returns:
        The rotation, None without one; and the factor, None where nothing agrees, as with a norm
        in between.
    """
    query, key = scored["q"], scored["k"]
    exact = query.dtype in (torch.float32, torch.float64)
    tolerance = _AGREES if exact else 20 * _AGREES
    for rotation in (None, *_candidates(position_embeddings, *query.shape[2:])):
        rotated = [
            projected[role] if rotation is None else rotation.rotate(projected[role])
            for role in ("q", "k")
        ]
        if rotated[0].shape != query.shape or rotated[1].shape != key.shape:
            continue
        wanted = query.float()
        factor = float((rotated[0] * wanted).sum() / rotated[0].square().sum().clamp(min=1e-30))
        agrees = _close(rotated[0] * factor, wanted, tolerance)
        if agrees and _close(rotated[1], key.float(), tolerance):
            return rotation, factor
    return None, None


def _candidates(position_embeddings: Any, length: int, head_dim: int) -> Iterator[Rotation]:
    if not (isinstance(position_embeddings, tuple) and len(position_embeddings) == 2):
        return
    cos, sin = (
        table.float()[0] if table.dim() == 3 else table.float() for table in position_embeddings
    )
    if cos.dim() != 2 or cos.shape[0] != length:
        return
    width = cos.shape[1]
    half = width // 2
    if width <= head_dim and width % 2 == 0:
        yield Rotation(RotaryPairs.halves(width, head_dim), cos[:, :half], sin[:, :half])
        yield Rotation(RotaryPairs.interleaved(width, head_dim), cos[:, ::2], sin[:, ::2])
        yield Rotation(RotaryPairs.interleaved(width, head_dim), cos[:, :half], sin[:, :half])
    if 2 * width <= head_dim:  # one angle per pair
        yield Rotation(RotaryPairs.halves(2 * width, head_dim), cos, sin)


def _close(got: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return bool((got - wanted).abs().max() <= tolerance * wanted.abs().max().clamp(min=1e-30))
