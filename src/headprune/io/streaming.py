"""Writing safetensors to an open file, one tensor at a time, and telling tensors apart by hash.

safetensors' own writer opens a file by its name, which a confined process cannot, and wants all
tensors in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from headprune.tensors.dtypes import SAFETENSORS, dtype_name

DTYPES = {dtype: name for name, dtype in SAFETENSORS.items()}


def write(tensors: dict[str, Tensor], file: IO[bytes]) -> dict[str, list[Any]]:
    """Writes tensors, each as a contiguous copy of its own.

    Args:
        tensors: By name.
        file: Open for writing.

    Returns:
        What ``describe`` says of each.
    """
    text, order = header({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})
    file.write(text)
    described = {}
    for name in order:
        tensor = tensors[name]
        raw = bytes_of(tensor)
        described[name] = describe(tensor, raw)
        file.write(raw.numpy().data)
    file.flush()
    return described


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
