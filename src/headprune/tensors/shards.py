"""Tensors that are split over processes."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; where it is split over processes, all of them have to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
