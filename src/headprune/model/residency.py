"""One block of a model in memory at a time: it is filled when it runs, and emptied afterwards.

The forward pass is the model's. A block is a module that transformers never splits over devices,
mostly a layer, or a head with its own weights; embeddings and the last norm stay in memory. Writes
into a block go to a temporary file, from which it is filled from then on. With gradients a block
runs as a checkpoint: it keeps its inputs, and runs again, with weights read again, for these.

accelerate's offloading (``align_module_device``, ``dispatch_model``) loses writes to a
weight, holds every block for the gradient, and does not read ahead.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from headprune.errors import CheckpointError
from headprune.io.shards import StoredTensor, rows_of
from headprune.io.streaming import bytes_of
from headprune.model.skeleton import Names, Unmapped
from headprune.tensors.dtypes import SAFETENSORS


@dataclass(frozen=True)
class _Slot:
    """The place of a weight: its module, its name there, and the empty weight."""

    owner: nn.Module
    name: str
    empty: nn.Parameter


class Residency:
    """Fills the blocks of a model on the meta device as they run on another device.

    Raises:
        Unmapped: If a weight is no tensor of the checkpoint, or no module is a block.
    """

    def __init__(
        self,
        net: PreTrainedModel,
        tensors: Mapping[str, StoredTensor],
        device: torch.device,
    ) -> None:
        self.device = device
        self.stored_as: Callable[[str], torch.dtype] | None = None
        self._original = sources(net, tensors)
        self._sources = {**self._original}
        layers = blocks_of(net)
        self.blocks = [*layers, *_own_head(net, layers)]
        self._layers = len(layers)
        self._slots = [_slots(net, block) for block in self.blocks]
        self._held: Counter[int] = Counter()
        self._filled: dict[str, tuple[nn.Parameter, int]] = {}
        self._reader, self._last = ThreadPoolExecutor(1), -1
        self._coming: tuple[int, Future[dict[str, Tensor]]] | None = None
        self._spool = _Spool()
        self._fill_rest(net)

    def attach(self) -> None:
        """Fill and empty the blocks of the model from now on."""
        for number, block in enumerate(self.blocks):
            block.forward = partial(self._run, number, block.forward)
            for module in block.modules():
                module.__dict__[_PLACE] = (self, number)

    def written(self) -> dict[str, StoredTensor]:
        """Return the written weights, by their names in the model."""
        return {n: s for n, s in self._sources.items() if s is not self._original[n]}

    @contextmanager
    def replaced(self, tensors: Mapping[str, StoredTensor | Tensor]) -> Iterator[None]:
        """Swap weights of blocks for the time of a ``with`` block."""
        with self._undone():
            for name, tensor in tensors.items():
                if isinstance(tensor, Tensor):
                    tensor = self._spool.written(tensor.detach())
                self._sources[name] = tensor
            self._coming = None  # read ahead, before the swap
            yield

    @contextmanager
    def collecting(self, changed: dict[str, Any]) -> Iterator[None]:
        """Collect the weights that a ``with`` block writes, and undo it at the end."""
        former = self._sources
        with self._undone():
            yield
            changed |= {n: s for n, s in self._sources.items() if s is not former[n]}

    @contextmanager
    def _undone(self) -> Iterator[None]:
        former, self._sources = self._sources, {**self._sources}
        try:
            yield
        finally:
            self._sources, self._coming = former, None

    @contextmanager
    def holding(self, number: int) -> Iterator[None]:
        """Keep a block filled in a ``with`` block."""
        if not self._held[number]:
            self._fill(number)
        self._held[number] += 1
        try:
            yield
        finally:
            self._held[number] -= 1
            if not self._held[number]:
                self._release(number)

    def _run(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def held(*args: Any, **kwargs: Any) -> Any:
            with self.holding(number):
                return forward(*args, **kwargs)

        # a layer is held until its gradients have come by, and a head as long as they need it
        whole = self._held[number] or number >= self._layers
        if not torch.is_grad_enabled() or _RECOMPUTING or whole:
            return held(*args, **kwargs)
        # a cache would get the same keys twice
        without = dict.fromkeys({"past_key_values", "past_key_value", "layer_past"} & set(kwargs))
        return checkpoint(
            held, *args, use_reentrant=False, context_fn=_contexts, **{**kwargs, **without}
        )

    def _fill(self, number: int) -> None:
        values = self._read(number) if number >= self._layers else self._read_ahead(number)
        for full, slot in self._slots[number].items():
            value = self._rounded(full, values.pop(full), slot.empty.dtype)
            weight = nn.Parameter(value, slot.empty.requires_grad)
            slot.owner._parameters[slot.name] = weight
            self._filled[full] = weight, weight._version

    def _read_ahead(self, number: int) -> dict[str, Tensor]:
        """Return the weights of a layer, and begin to read those of the next."""
        coming, self._coming = self._coming, None
        ahead = coming is not None and coming[0] == number
        values = coming[1].result() if coming is not None and ahead else self._read(number)
        step = 1 if number > self._last else -1  # backwards through the model, where gradients are
        self._last = number
        if 0 <= number + step < self._layers:
            self._coming = number + step, self._reader.submit(self._read, number + step)
        return values

    def _release(self, number: int) -> None:
        if self._coming is not None and self._coming[0] == number:
            self._coming = None  # read before it was written to
        for full, slot in self._slots[number].items():
            weight, version = self._filled.pop(full)
            if weight._version != version:
                self._sources[full] = self._spool.written(weight.detach())
            slot.owner._parameters[slot.name] = slot.empty

    def _read(self, number: int) -> dict[str, Tensor]:
        """Return the weights of a block as stored, which may take half of the room."""
        return {full: rows_of(self._sources[full]).to(self.device) for full in self._slots[number]}

    def _rounded(self, full: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        if self.stored_as is None or (stored := self.stored_as(full)) == value.dtype:
            return value.to(dtype)
        return value.to(dtype).to(stored).to(dtype)

    def _fill_rest(self, net: PreTrainedModel) -> None:
        """Fill the weights outside of blocks, and all buffers."""
        inside = {full for slots in self._slots for full in slots}
        filled: dict[int, nn.Parameter] = {}  # tied ones stay tied
        for full, weight in net.named_parameters(remove_duplicate=False):
            if full in inside:
                continue
            if id(weight) not in filled:
                value = rows_of(self._sources[full]).to(self.device, weight.dtype)
                filled[id(weight)] = nn.Parameter(value, weight.requires_grad)
            owner, _, name = full.rpartition(".")
            net.get_submodule(owner)._parameters[name] = filled[id(weight)]
        with init_empty_weights(include_buffers=False):
            fresh = dict(type(net)(net.config).named_buffers())
        for full, buffer in list(net.named_buffers()):
            saved = full in self._sources
            value = rows_of(self._sources[full]) if saved else fresh[full]
            owner, _, name = full.rpartition(".")
            net.get_submodule(owner)._buffers[name] = value.to(self.device, buffer.dtype)


class _Spool:
    """A temporary file of tensors, gone with the object."""

    def __init__(self) -> None:
        with TemporaryFile() as file:  # without a name, so that a kill leaves nothing behind
            self._file = os.dup(file.fileno())
        self._path, self._end = Path(f"/dev/fd/{self._file}"), 0
        weakref.finalize(self, os.close, self._file)

    def written(self, tensor: Tensor) -> StoredTensor:
        """Write a tensor behind all others.

        Raises:
            CheckpointError: If there is no room for it.
        """
        content, start = bytes_of(tensor.cpu().contiguous()).numpy().data, self._end
        self._end += len(content)
        done = 0
        try:
            while done < len(content):
                done += os.pwrite(self._file, content[done:], start + done)
        except OSError as error:
            raise CheckpointError(
                f"The weights that change cannot be kept in '{gettempdir()}': {error}. Set "
                "TMPDIR to a folder with room for them."
            ) from None
        name = next(name for name, dtype in SAFETENSORS.items() if dtype is tensor.dtype)
        return StoredTensor(name, tuple(tensor.shape), self._path, start)


_PLACE = "headprune_place"  # of a module: its Residency, and the number of its block
_RECOMPUTING: list[bool] = []


@contextmanager
def present(module: nn.Module) -> Iterator[None]:
    """Keep the weights of a module in memory in a ``with`` block."""
    place: tuple[Residency, int] | None = module.__dict__.get(_PLACE)
    with nullcontext() if place is None else place[0].holding(place[1]):
        yield


def recomputing() -> bool:
    """Return whether a block runs a second time, for its gradients alone."""
    return bool(_RECOMPUTING)


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _recomputed()


@contextmanager
def _recomputed() -> Iterator[None]:
    _RECOMPUTING.append(True)
    try:
        yield
    finally:
        _RECOMPUTING.pop()


def runs_by_layers(net: PreTrainedModel, tensors: Mapping[str, StoredTensor]) -> bool:
    """Return whether a model on the meta device can run layer by layer from these tensors."""
    try:
        blocks_of(net)
        sources(net, tensors)
    except Unmapped:
        return False
    return True


def residency_of(net: nn.Module) -> Residency | None:
    """Return the residency of a model; None if it is in memory as a whole."""
    return next((m.__dict__[_PLACE][0] for m in net.modules() if _PLACE in m.__dict__), None)


def blocks_of(net: PreTrainedModel) -> list[nn.Module]:
    """Return the outermost unsplit modules, without the embeddings."""
    kinds, embeddings = set(net._no_split_modules or ()), None
    with suppress(NotImplementedError):  # a model of images may have none
        embeddings = net.get_input_embeddings()
    blocks: dict[str, nn.Module] = {}
    for name, module in net.named_modules():
        inside = any(name.startswith(f"{other}.") for other in blocks)
        if type(module).__name__ in kinds and not inside and embeddings not in module.modules():
            blocks[name] = module
    if not blocks:
        raise Unmapped(f"{type(net).__name__} does not say which of its modules are layers.")
    return list(blocks.values())


def _own_head(net: PreTrainedModel, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the output embeddings, if they share no weight."""
    head = net.get_output_embeddings()
    if head is None:
        return []
    own = {id(weight) for weight in head.parameters()}
    uses = [id(w) for _, w in net.named_parameters(remove_duplicate=False) if id(w) in own]
    inside = any(head in layer.modules() for layer in layers)
    return [] if inside or not own or len(uses) > len(own) else [head]


def _slots(net: PreTrainedModel, block: nn.Module) -> dict[str, _Slot]:
    path = next(name for name, module in net.named_modules() if module is block)
    slots = {}
    for name, weight in block.named_parameters():
        owner, _, last = name.rpartition(".")
        slots[f"{path}.{name}"] = _Slot(block.get_submodule(owner), last, weight)
    return slots


def sources(net: PreTrainedModel, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the stored tensor of every weight, and of every saved buffer.

    Raises:
        Unmapped: If one is no tensor of it.
    """
    names = Names.of(net)
    state = net.state_dict(keep_vars=True)
    known = {id(state[name]): name for name in names.disk}
    return {
        name: names.source(net, known.get(id(tensor), name), tensors)
        for name, tensor in state.items()
    }
