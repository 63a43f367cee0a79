"""One block of a model in memory at a time: weights come when it runs, and go when it is through.

The forward pass is the model's own. A block is what transformers never splits over devices, mostly
a layer, and a head with weights of its own, which many passes never come to; all else (embeddings,
the last norm) stays. What is written into a block is kept in a file of its own, from which the
block is filled from then on.

Where gradients are wanted, a block runs as a checkpoint: of its forward pass its inputs alone are
kept, and it runs again, with weights read again, when the gradients come by.
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
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from headprune.errors import CheckpointError
from headprune.io.shards import StoredTensor, rows_of
from headprune.io.streaming import bytes_of
from headprune.io.temporary import temporary_file
from headprune.model.skeleton import Names, Unmapped
from headprune.tensors.dtypes import SAFETENSORS


@dataclass(frozen=True)
class _Slot:
    """A place for a weight: its module, its name there, and what stands there without one."""

    owner: nn.Module
    name: str
    empty: nn.Parameter


class Residency:
    """Fills the blocks of a model without weights as they run.

    Args:
        net: The model, on the meta device; its blocks stay there.
        tensors: What its checkpoint holds.
        device: Where it computes.

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
        self.changed: dict[str, StoredTensor] = {}
        self.stored_as: Callable[[str], torch.dtype] | None = None
        self._sources = sources(net, tensors)
        self._disk = {source: name for name, source in tensors.items()}
        layers = blocks_of(net)
        self.blocks = [*layers, *_own_head(net, layers)]
        self._layers = len(layers)
        self._slots = [_slots(net, block) for block in self.blocks]
        self._forwards: list[Any] = []
        self._held: Counter[int] = Counter()
        self._filled: dict[str, tuple[nn.Parameter, int]] = {}
        self._reader, self._last = ThreadPoolExecutor(1), -1
        self._coming: tuple[int, Future[dict[str, Tensor]]] | None = None
        self._spool = _Spool()
        self._fill_rest(net)

    def attach(self) -> None:
        """Has the blocks of the model come and go from now on."""
        for number, block in enumerate(self.blocks):
            self._forwards.append(block.__dict__.get("forward"))
            block.forward = partial(self._run, number, block.forward)
            for module in block.modules():
                module.__dict__[_PLACE] = (self, number)

    def detach(self) -> None:
        """Gives the model back its own forward passes."""
        for block, forward in zip(self.blocks, self._forwards, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward
            for module in block.modules():
                del module.__dict__[_PLACE]
        self._forwards = []
        self._reader.shutdown()

    def written(self) -> dict[str, StoredTensor]:
        """The weights that were written, by their names in the model."""
        kept = set(self.changed.values())
        return {full: source for full, source in self._sources.items() if source in kept}

    def restored(self) -> Callable[[], None]:
        """Return a function that undoes all that is written to the weights from now on."""
        noted = {**self._sources}, {**self.changed}
        self._spool.keep()

        def restore() -> None:
            self._coming = None  # read ahead, of what they were
            self._spool.keep()
            self._sources, self.changed = ({**part} for part in noted)

        return restore

    @contextmanager
    def replaced(self, tensors: Mapping[str, StoredTensor | Tensor]) -> Iterator[None]:
        """Swap weights of blocks for the time of a ``with`` block."""
        restore = self.restored()
        try:
            for name, tensor in tensors.items():
                if isinstance(tensor, Tensor):
                    self._keep(name, tensor.detach())
                    continue
                disk = self._disk[self._sources[name]]
                self._sources[name] = self.changed[disk] = tensor
                self._disk[tensor] = disk
            self._coming = None  # read ahead, of what they were
            yield
        finally:
            restore()

    @contextmanager
    def collecting(self, changed: dict[str, Any]) -> Iterator[None]:
        """Collect the weights that a ``with`` block writes, and undo it at the end."""
        before, restore = {**self._sources}, self.restored()
        try:
            yield
            changed |= {n: each for n, each in self._sources.items() if each != before[n]}
        finally:
            restore()

    @contextmanager
    def holding(self, number: int) -> Iterator[None]:
        """Has the weights of a block there for the time of a ``with`` block."""
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

        # what is held stays until its gradients have come by, and a head as long as they need it
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
        """The weights of a layer, while those of the next begin to be read."""
        coming, self._coming = self._coming, None
        asked = coming is not None and coming[0] == number
        values = coming[1].result() if coming is not None and asked else self._read(number)
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
                self._keep(full, weight.detach())
            slot.owner._parameters[slot.name] = slot.empty

    def _read(self, number: int) -> dict[str, Tensor]:
        """The weights of a block as they are stored, which may take half of the room."""
        return {full: rows_of(self._sources[full]).to(self.device) for full in self._slots[number]}

    def _value(self, full: str, dtype: torch.dtype) -> Tensor:
        return rows_of(self._sources[full]).to(self.device, dtype)

    def _rounded(self, full: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        if self.stored_as is None or (stored := self.stored_as(full)) == value.dtype:
            return value.to(dtype)
        return value.to(dtype).to(stored).to(dtype)

    def _keep(self, full: str, weight: Tensor) -> None:
        """Writes a weight to the file of those that changed, where its last version was if any."""
        before = self._sources[full]
        disk, kept = self._disk[before], self._spool.written(weight, before)
        self._sources[full] = self.changed[disk] = kept
        self._disk[kept] = disk

    def _fill_rest(self, net: PreTrainedModel) -> None:
        """Gives weights to what is in no block, and numbers to all buffers."""
        inside = {full for slots in self._slots for full in slots}
        filled: dict[int, nn.Parameter] = {}  # tied ones stay tied
        for full, weight in net.named_parameters(remove_duplicate=False):
            if full in inside:
                continue
            owner, name = net.get_submodule(full.rpartition(".")[0]), full.rpartition(".")[2]
            if id(weight) not in filled:
                value = self._value(full, weight.dtype)
                filled[id(weight)] = nn.Parameter(value, weight.requires_grad)
            owner._parameters[name] = filled[id(weight)]
        with init_empty_weights(include_buffers=False):
            fresh = dict(type(net)(net.config).named_buffers())
        for full, buffer in list(net.named_buffers()):
            value = fresh[full].to(buffer.dtype)
            if full in self._sources:
                value = self._value(full, buffer.dtype)
            owner, name = net.get_submodule(full.rpartition(".")[0]), full.rpartition(".")[2]
            owner._buffers[name] = value.to(self.device)


class _Spool:
    """A temporary file of tensors, gone with the object."""

    def __init__(self) -> None:
        self._file, self._path = temporary_file()
        self._end = self._kept = 0
        weakref.finalize(self, _discard, self._file, self._path)

    def keep(self) -> None:
        """Overwrites nothing of what is there."""
        self._kept = self._end

    def written(self, tensor: Tensor, before: StoredTensor) -> StoredTensor:
        """Writes a tensor in the place of its last version, or behind all others.

        Raises:
            CheckpointError: If there is no room for it.
        """
        content, start = bytes_of(tensor.cpu().contiguous()).numpy().data, before.start
        if before.file != self._path or start < self._kept:
            start, self._end = self._end, self._end + len(content)
        done = 0
        try:
            while done < len(content):
                done += os.pwrite(self._file, content[done:], start + done)
        except OSError as error:
            raise CheckpointError(
                f"The weights that change cannot be kept in '{self._path.parent}': {error}. Set "
                "TMPDIR to a folder with room for them."
            ) from None
        name = next(name for name, dtype in SAFETENSORS.items() if dtype is tensor.dtype)
        return StoredTensor(name, tuple(tensor.shape), self._path, start)


def _discard(file: int, path: Path) -> None:
    os.close(file)
    path.unlink(missing_ok=True)


_PLACE = "headprune_place"  # of a module: what fills it, and which block it is in
_RECOMPUTING: list[bool] = []


@contextmanager
def present(module: nn.Module) -> Iterator[None]:
    """Has the weights of a module there for the time of a ``with`` block, wherever they are."""
    place: tuple[Residency, int] | None = module.__dict__.get(_PLACE)
    with nullcontext() if place is None else place[0].holding(place[1]):
        yield


def recomputing() -> bool:
    """Whether a block runs a second time, for its gradients alone."""
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
    """Whether a model without weights can be run layer by layer from these tensors."""
    try:
        blocks_of(net)
        sources(net, tensors)
    except Unmapped:
        return False
    return True


def residency_of(net: nn.Module) -> Residency | None:
    """What fills the blocks of a model; None for one that is in memory as a whole."""
    return next((m.__dict__[_PLACE][0] for m in net.modules() if _PLACE in m.__dict__), None)


def blocks_of(net: PreTrainedModel) -> list[nn.Module]:
    """The modules that are not split, without those inside of others, and the embeddings."""
    kinds, embeddings = set(net._no_split_modules or ()), None
    with suppress(NotImplementedError):  # a model of images may have none
        embeddings = net.get_input_embeddings()
    found: dict[str, nn.Module] = {}
    for name, module in net.named_modules():
        inside = any(name.startswith(f"{other}.") for other in found)
        if type(module).__name__ in kinds and not inside and embeddings not in module.modules():
            found[name] = module
    if not found:
        raise Unmapped(f"{type(net).__name__} does not say which of its modules are layers.")
    return list(found.values())


def _own_head(net: PreTrainedModel, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The output embeddings, if nothing else has their weights."""
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
    """Where the checkpoint has every weight, and every buffer that is saved.

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
