"""The header of a safetensors file, and the bytes of its tensors.

safetensors' own writer wants all tensors in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headprune.tensors.dtypes import SAFETENSORS, dtype_name

DTYPES = {dtype: name for name, dtype in SAFETENSORS.items()}


def header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, list[str]]:
    """The header of a file, as safetensors writes it, and the order of the tensors behind it.

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
    """The numbers of a tensor as bytes, in the order of its elements."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def equal_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether bytes are the same; NumPy tells it much faster than torch does.

    Args:
        one: Some bytes, on the CPU.
        other: As many.
    """
    return np.array_equal(one.numpy(), other.numpy())


def describe(tensor: Tensor, raw: Tensor) -> list[Any]:
    """Element type, shape, and the SHA-256 of the bytes: equal for tensors that are the same."""
    digest = hashlib.sha256(raw.numpy().data).hexdigest()
    return [dtype_name(tensor.dtype), list(tensor.shape), digest]
