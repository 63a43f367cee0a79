"""Writing safetensors to an open file, one tensor at a time, and telling tensors apart by hash.

safetensors' own writer opens a file by its name, which a confined process cannot, and wants all
tensors in memory.
"""

from __future__ import annotations

import hashlib
import json
from typing import IO, Any

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
    # the largest elements first: all are aligned then
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        offsets = [start, end]
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    described = {}
    for name, tensor in ordered:
        raw = bytes_of(tensor)
        described[name] = describe(tensor, raw)
        file.write(raw.numpy().data)
    file.flush()
    return described


def bytes_of(tensor: Tensor) -> Tensor:
    """The numbers of a tensor as bytes, in the order of its elements."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def describe(tensor: Tensor, raw: Tensor) -> list[Any]:
    """Element type, shape, and the SHA-256 of the bytes: equal for tensors that are the same."""
    digest = hashlib.sha256(raw.numpy().data).hexdigest()
    return [dtype_name(tensor.dtype), list(tensor.shape), digest]
