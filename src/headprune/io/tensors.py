"""Small safetensors files that headprune writes beside its JSON."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from headprune.errors import CheckpointError
from headprune.io.streaming import bytes_of
from headprune.tensors.dtypes import dtype_name


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file.

    Raises:
        CheckpointError: If it is missing or damaged.
    """
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError, LookupError, ValueError) as error:
        # a type that torch has not is a KeyError
        raise CheckpointError(f"'{path}' cannot be read: {error}. Get it again.") from None
    return tensors


def described(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Return element type, shape and SHA-256 of each tensor: equal where the tensors are."""
    return {name: _described(tensor) for name, tensor in tensors.items()}


def _described(tensor: Tensor) -> list[Any]:
    digest = hashlib.sha256(bytes_of(tensor.cpu()).numpy().data).hexdigest()
    return [dtype_name(tensor.dtype), list(tensor.shape), digest]
