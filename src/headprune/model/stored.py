"""The tensors of a checkpoint on disk, their element types, and the id of its files.

A result keeps the element type of every tensor, though work is done in float32
(``model.precision``). Only headers are read, except for the id.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from headprune.errors import CheckpointError
from headprune.io import hub
from headprune.io.folders import digest_of, hashing
from headprune.io.shards import StoredTensor, overflow, tensors_in
from headprune.model.config_file import CONFIG, write_config
from headprune.model.reading import read_config_file, read_index, read_record
from headprune.model.residency import residency_of
from headprune.model.skeleton import either_way
from headprune.tensors.dtypes import SAFETENSORS, dtype_name
from headprune.tensors.shards import parts_of, whole

_FLOATS = {name: SAFETENSORS[name] for name in ("F64", "F32", "F16", "BF16")}


def stored_tensors(model: str | Path, **where: Any) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name; none for a hub id not in the cache.

    Args:
        model: Folder or hub id.
        **where: ``subfolder``, ``revision`` and ``cache_dir``, as for ``from_pretrained``.

    Raises:
        CheckpointError: If a file is damaged, or missing from a folder.
    """
    found: dict[str, StoredTensor] = {}
    for name, file in weight_files(model, **where).items():
        if file is not None:
            found |= tensors_in(file)
        elif Path(model).is_dir():
            raise CheckpointError(
                f"The index of '{model}' names the weights '{name}', which are not beside it. Get "
                "the folder again."
            )
    return found


def fetch_weights(model: str | Path) -> None:
    """Bring the safetensors of a hub model into the cache, as transformers would choose them.

    Raises:
        CheckpointError: If the index of its files is damaged.
    """
    _chosen(lambda name: find_file(model, name, ask=True))


def _model_files(model: str | Path) -> list[Path]:
    """Return the paths of config.json and the weights; none for a hub id not in the cache."""
    files = [find_file(model, "config.json"), *weight_files(model).values()]
    present = [file for file in files if file is not None]
    return present if files[0] is not None and len(present) > 1 else []


def weight_files(model: str | Path, **where: Any) -> dict[str, Path | None]:
    """Return the weight files by name; None for a missing shard. As for ``stored_tensors``."""
    return _chosen(lambda name: find_file(model, name, **where))


def _chosen(find: Callable[[str], Path | None]) -> dict[str, Path | None]:
    """Return the weights that config.json names, or else the usual ones."""
    config = find("config.json")
    named = read_config_file(config).get("transformers_weights") if config is not None else None
    for name in [named] if named else [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME]:
        file = find(name)
        if file is not None and name.endswith(".index.json"):
            return {shard: find(shard) for shard in read_index(file)}
        if file is not None:
            return {name: file}
    return {}


def find_file(
    model: str | Path,
    name: str,
    subfolder: str | None = None,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    ask: bool = False,
    token: str | bool | None = None,
) -> Path | None:
    """Return a file of a folder or of a hub model; None if it is not there.

    Args:
        model: Folder or hub id.
        name: The file.
        subfolder: As for transformers; also ``revision``, ``cache_dir`` and ``token``.
        revision: Branch, tag or commit.
        cache_dir: The cache of the hub; None for the usual one.
        ask: Whether the hub is asked for a file that its cache does not know.
        token: For the hub; None for the token of the login.
    """
    inside = f"{subfolder}/{name}" if subfolder else name
    if Path(model).is_dir():
        file = Path(model) / inside
        return file if file.is_file() else None
    try:
        cached = try_to_load_from_cache(str(model), inside, cache_dir, revision)
    except HFValidationError:  # reading the config refuses it
        return None
    if cached is None and ask:
        return hub.fetched(model, inside, revision=revision, cache_dir=cache_dir, token=token)
    return Path(cached) if isinstance(cached, str) else None


@dataclass(frozen=True)
class StoredDtypes:
    """The element types that a model's tensors are written in.

    Attributes:
        default: Type of most elements.
        exceptions: Types of other tensors, by the name in the live model.
    """

    default: torch.dtype
    exceptions: Mapping[str, torch.dtype] = field(default_factory=dict)

    def of(self, name: str) -> torch.dtype:
        """Return the element type of one tensor."""
        return self.exceptions.get(name, self.default)

    @property
    def names(self) -> str:
        """The types for readers, the commonest first."""
        every = dict.fromkeys((self.default, *self.exceptions.values()))
        return ", ".join(map(dtype_name, every))

    def narrows(self, net: PreTrainedModel) -> bool:
        """Return whether some weight has more digits than its stored type."""
        return any(_bits(self.of(name)) < _bits(tensor.dtype) for name, tensor in _floating(net))

    def refuse_overflow(self, net: PreTrainedModel) -> None:
        """Refuse finite weights that these types cannot hold.

        Raises:
            CheckpointError: With the first such tensor.
        """
        for name, tensor in _floating(net):
            limit = torch.finfo(self.of(name)).max
            there = tensor.numel() and not tensor.is_meta  # tensors read later are looked at then
            least, most = whole(tensor.detach()).aminmax() if there else (torch.zeros(()),) * 2
            largest = max(-float(least), float(most))
            if limit < largest < math.inf:
                raise overflow(name, largest, self.of(name))

    @torch.no_grad()
    def round(self, net: PreTrainedModel) -> bool:
        """Round every weight to its stored type, in place; return whether any changed.

        Raises:
            CheckpointError: If a weight overflows.
        """
        self.refuse_overflow(net)
        residency = residency_of(net)
        changed = residency is not None
        if residency is not None:
            residency.stored_as = self.of
        for name, tensor in _floating(net):
            if not tensor.is_meta and _bits(self.of(name)) < _bits(tensor.dtype):
                for part in parts_of(tensor):
                    rounded = part.to(self.of(name)).to(part.dtype)
                    changed |= not torch.equal(whole(rounded), whole(part))
                    part.copy_(rounded)
        return changed

    @torch.no_grad()
    def cast(self, net: PreTrainedModel) -> None:
        """Cast every weight to its stored type, in place, one after the other."""
        for name, tensor in _floating(net):
            tensor.data = tensor.data.to(self.of(name))
        for config in _configs(net):
            config.dtype = self.default

    def save(self, net: PreTrainedModel, folder: Path, source: str | Path | None) -> None:
        """Cast a model and write all but its weights; its config names the type of most of them.

        Args:
            net: The model.
            folder: The result.
            source: The model of the same class whose config.json it keeps to; None without one.

        Raises:
            CheckpointError: If transformers does not write its config.
        """
        self.cast(net)
        try:
            net.save_pretrained(folder, state_dict={})
        except StrictDataclassError as error:
            why = " ".join(str(error.__cause__ or error).split()).rstrip(".")
            raise CheckpointError(
                f"transformers does not write the config of this model: {why}. Correct its "
                "config.json."
            ) from None
        net.config.dtype = self.default  # transformers goes by the first weight
        write_config(net.config, folder, None if source is None else find_file(source, CONFIG))


def stored_dtypes(
    net: PreTrainedModel,
    tensors: Mapping[str, StoredTensor],
    default: torch.dtype | None = None,
) -> StoredDtypes:
    """Return the element types of a loaded model's checkpoint.

    Args:
        net: The model.
        tensors: Its tensors on disk; empty for a model made in memory.
        default: Element type without such tensors; None for that of ``net``.
    """
    floats = {name: _FLOATS[t.dtype] for name, t in tensors.items() if t.dtype in _FLOATS}
    default = commonest_dtype(tensors) or default or net.dtype
    by_tensor: dict[int, torch.dtype] = {}  # tied ones have several names, one on disk
    if len({*floats.values()}) > 1:
        for name, tensor in _floating(net):
            kinds = {floats[n] for n in _names_on_disk(net, name, tensor) if n in floats}
            if len(kinds) == 1 and kinds != {default}:
                by_tensor[id(tensor)] = kinds.pop()
    exceptions = {n: by_tensor[id(t)] for n, t in _floating(net) if id(t) in by_tensor}
    return StoredDtypes(default, exceptions)


def commonest_dtype(tensors: Mapping[str, StoredTensor]) -> torch.dtype | None:
    """Return the element type of most elements; None without any."""
    counts: Counter[torch.dtype] = Counter()
    for tensor in tensors.values():
        if tensor.dtype in _FLOATS:
            counts[_FLOATS[tensor.dtype]] += tensor.elements
    return counts.most_common(1)[0][0] if counts else None


def uniform(tensors: Mapping[str, StoredTensor]) -> bool:
    """Return whether all weights are of one element type."""
    return len({tensor.dtype for tensor in tensors.values() if tensor.dtype in _FLOATS}) <= 1


def refuse_quantised_tensors(model: str | Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse weights in a type that no model computes in.

    Raises:
        CheckpointError: With the first such tensor.
    """
    for name, tensor in tensors.items():
        if tensor.dtype.startswith(("F8_", "F6_", "F4")):
            raise CheckpointError(
                f"'{model}' is quantised: '{name}' is stored in {tensor.dtype}. Give the "
                "unquantised model that it was made from, and quantise the result."
            )


def _bits(dtype: torch.dtype) -> int:
    return torch.finfo(dtype).bits


def _names_on_disk(net: PreTrainedModel, name: str, tensor: Tensor) -> list[str]:
    """Return the names that a tensor of the live model may have in its checkpoint."""
    names = [*either_way(net, name)]
    with contextlib.suppress(Exception):  # a conversion that one tensor alone does not undergo
        names += revert_weight_conversion(net, {name: torch.empty_like(tensor, device="meta")})
    return names


def _floating(net: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the saved floating-point tensors, so not Marian's sinusoids."""
    ignored = set(net._keys_to_ignore_on_save or ())
    for name, tensor in net.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and name not in ignored:
            yield name, tensor


def _configs(net: PreTrainedModel) -> list[PreTrainedConfig]:
    parts = [getattr(net.config, name, None) for name in net.config.sub_configs]
    return [net.config, *(part for part in parts if part is not None)]


def id_of_model(model: str | Path) -> str | None:
    """Return the id of a model, which does not depend on its place or name.

    A result has the id of its manifest while config and weights are as written; any other model
    has the digest of its config and weights.

    Args:
        model: Folder or hub id.

    Returns:
        The id; None for a hub model whose files are not in the cache.

    Raises:
        CheckpointError: If the manifest is damaged.
    """
    with identifying(model) as known:
        return known()


@contextmanager
def identifying(model: str | Path) -> Iterator[Callable[[], str | None]]:
    """Hash a model's files while the block runs; yield a function that waits for its id."""
    files = _model_files(model)
    if not files:
        yield lambda: None
        return
    folder = files[0].parent

    def identify() -> str:
        digests, record = hashes(), read_record(folder)
        if record is not None and digests.items() <= record.files.items():
            return record.id
        return digest_of(digests)

    with hashing(folder, (file.name for file in files)) as hashes:
        yield identify
