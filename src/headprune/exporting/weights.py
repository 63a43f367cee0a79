"""The weights of a folder, read piece by piece, so that memory does not follow their size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from headprune.io.shards import StoredTensor, rows_of
from headprune.model.base_names import either_way
from headprune.model.stored import stored_tensors

_PIECE = 2**19  # numbers; a MB or two stays in a processor's cache until it is written


class Weights(Mapping[str, Tensor]):
    """Tensors by name, each read anew whenever it is asked for."""

    def __contains__(self, name: object) -> bool:
        """Whether there is such a tensor; that of Mapping would read it."""
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
        net: The model, whose names may differ from those on disk by the base model's prefix.
    """

    def __init__(self, folder: Path, net: PreTrainedModel) -> None:
        stored = stored_tensors(folder)
        self._found: dict[str, StoredTensor] = {}
        for name in net.state_dict():
            on_disk = next((one for one in either_way(net, name) if one in stored), None)
            if on_disk is not None:
                self._found[name] = stored[on_disk]

    def __getitem__(self, name: str) -> Tensor:
        """Reads a tensor as a whole.

        Raises:
            CheckpointError: If its file is damaged.
        """
        return rows_of(self._found[name])

    def __contains__(self, name: object) -> bool:
        """Whether there is such a tensor."""
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
        """How many bytes a tensor takes."""
        return self._found[name].bytes

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)
