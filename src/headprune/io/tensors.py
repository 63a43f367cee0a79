"""The small safetensors files that headprune writes beside its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from headprune.errors import CheckpointError
from headprune.io.streaming import bytes_of, describe


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file.

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
    """Per tensor, what is equal for those that are the same."""
    return {name: describe(tensor, bytes_of(tensor.cpu())) for name, tensor in tensors.items()}
