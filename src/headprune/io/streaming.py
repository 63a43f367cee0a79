"""The header of a safetensors file, and the bytes of its tensors.

safetensors' own writer wants all tensors in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headprune.tensors.dtypes import SAFETENSORS

DTYPES = {dtype: name for name, dtype in SAFETENSORS.items()}


def header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, list[str]]:
    """Return the header of a file as safetensors writes it, and the order of the tensors.

    Args:
        tensors: Element type and shape by name.
    """
    # the largest elements first: all are aligned then
    order = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        dtype, shape = tensors[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        content[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor as bytes, in the order of its elements."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def equal_bytes(one: Tensor, two: Tensor) -> bool:
    """Return whether bytes on the CPU are the same; NumPy is much faster than torch here."""
    return np.array_equal(one.numpy(), two.numpy())
