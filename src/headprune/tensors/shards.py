"""Tensors split over processes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor; of one split over processes, all of them have to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


_PART = 1 << 22  # bytes: a copy takes little memory


def split_as(tensor: Tensor, other: Tensor) -> Tensor:
    """A tensor that every process has, split over them as another of its shape is."""
    if not isinstance(other, DTensor):
        return tensor
    mesh, placements = other.device_mesh, other.placements
    return distribute_tensor(tensor.to(other.device), mesh, placements, src_data_rank=None)


def parts_of(tensor: Tensor) -> Sequence[Tensor]:
    """Return views of some of its rows each; all of a tensor split over processes."""
    if isinstance(tensor, DTensor) or not tensor.dim():
        return [tensor]
    rows = max(1, _PART * len(tensor) // max(tensor.nbytes, 1))
    parts: Sequence[Tensor] = tensor.split(rows)
    return parts
