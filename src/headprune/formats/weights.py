"""The weights of a folder, read piece by piece, so that memory does not follow their size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from headprune.io.shards import StoredTensor, rows_of
from headprune.model.skeleton import Names, either_way
from headprune.model.stored import stored_tensors

_PIECE = 2**19  # numbers; a MB or two stays in a processor's cache until it is written


class Weights(Mapping[str, Tensor]):
    """Tensors by name, each read anew whenever it is asked for."""

    def __contains__(self, name: object) -> bool:
        """Return whether there is such a tensor; Mapping's own method would read it."""
        return any(name == one for one in self)

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
        net: The model, whose names may differ from those on disk.
    """

    def __init__(self, folder: Path, net: PreTrainedModel) -> None:
        stored, renamed = stored_tensors(folder), Names.of(net).disk
        self._found: dict[str, StoredTensor] = {}
        for name in net.state_dict():
            called = (renamed.get(name, name), *either_way(net, name))
            on_disk = next((one for one in called if one in stored), None)
            if on_disk is not None:
                self._found[name] = stored[on_disk]

    def __getitem__(self, name: str) -> Tensor:
        """Reads a tensor as a whole.

        Raises:
            CheckpointError: If its file is damaged.
        """
        return rows_of(self._found[name])

    def __contains__(self, name: object) -> bool:
        """Return whether there is such a tensor."""
        return name in self._found

    def pieces(self, name: str) -> Iterator[Tensor]:
        """The rows of a tensor, some at a time."""
        source = self._found[name]
        if len(source.shape) < 2:
            yield self[name]
            return
        step = max(1, _PIECE * source.shape[0] // max(source.elements, 1))
        for start in range(0, source.shape[0], step):
            yield rows_of(source, start, start + step)

    def bytes(self, name: str) -> int:
        """Return the bytes of a tensor."""
        return self._found[name].bytes

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


class WithFused(Weights):
    """Weights, and the tensors on disk that transformers fuses or splits when it loads them.

    Args:
        weights: Tensors by name, those of the model and others.
        folder: The model's folder.
        net: The model.

    Attributes:
        missing: Names of tensors that are neither.
    """

    def __init__(self, weights: Weights, folder: Path, net: PreTrainedModel) -> None:
        names, stored = Names.of(net), stored_tensors(folder)
        made = names.tensors.keys() - set(names.disk.values())
        self._weights = weights
        self._fused = {name: stored[name] for name in sorted(made) if name in stored}
        left = (made - self._fused.keys()) | (names.disk.keys() - weights)
        self.missing = tuple(sorted(left))

    def __getitem__(self, name: str) -> Tensor:
        return rows_of(self._fused[name]) if name in self._fused else self._weights[name]

    def bytes(self, name: str) -> int:
        """About how many bytes a tensor takes."""
        return self._fused[name].bytes if name in self._fused else self._weights.bytes(name)

    def __iter__(self) -> Iterator[str]:
        yield from self._weights
        yield from self._fused

    def __len__(self) -> int:
        return len(self._weights) + len(self._fused)
