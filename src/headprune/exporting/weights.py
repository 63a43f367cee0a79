"""The weights of a folder, read piece by piece, so that memory does not follow their size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from headprune.errors import CheckpointError
from headprune.model.stored import model_files, stored_tensors

_PIECE = 2**24  # numbers


class Weights(Mapping[str, Tensor]):
    """Tensors by name, each read anew whenever it is asked for."""

    def pieces(self, name: str) -> Iterator[Tensor]:
        """The rows of a tensor, some at a time."""
        yield self[name]

    def bytes(self, name: str) -> int:
        """About how many bytes a tensor takes."""
        return self[name].nbytes


class StoredWeights(Weights):
    """Tensors of a checkpoint by the names that a model of its class has for them.

    Args:
        folder: The folder.
        names: The names in the model, which may differ from those on disk by the base model's
            prefix.
        prefix: That prefix.
    """

    def __init__(self, folder: Path, names: Mapping[str, object], prefix: str) -> None:
        files = {}
        for file in model_files(folder):
            if file.suffix == ".safetensors":
                with safe_open(file, "pt") as content:
                    files.update(dict.fromkeys(content.keys(), file))
        stored = stored_tensors(folder)
        self._found = {}
        for name in names:
            known_as = (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
            on_disk = next((one for one in known_as if one in files), None)
            if on_disk is not None:
                self._found[name] = (files[on_disk], on_disk, stored[on_disk])

    def _read(self, name: str, rows: slice | None = None) -> Tensor:
        # the file is closed again at once: what is mapped of it counts as memory
        file, on_disk, _ = self._found[name]
        try:
            with safe_open(file, "pt") as content:
                part: Any = content.get_slice(on_disk)
                tensor: Tensor = part[rows] if rows is not None else content.get_tensor(on_disk)
                return tensor.clone()
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"'{file}' is damaged: {error}. Get it again.") from None

    def __getitem__(self, name: str) -> Tensor:
        """Reads a tensor as a whole.

        Raises:
            CheckpointError: If its file is damaged.
        """
        return self._read(name)

    def pieces(self, name: str) -> Iterator[Tensor]:
        """The rows of a tensor, some at a time."""
        shape = self._found[name][2].shape
        if len(shape) < 2:
            yield self[name]
            return
        step = max(1, _PIECE // max(shape[1], 1))
        for start in range(0, shape[0], step):
            yield self._read(name, slice(start, start + step))

    def bytes(self, name: str) -> int:
        """How many bytes a tensor takes."""
        return self._found[name][2].bytes

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)
