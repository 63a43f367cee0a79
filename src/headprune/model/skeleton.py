"""Models without weights, built from config and headers, and the names of tensors on disk.

transformers' loader builds them from empty tensors, so that it renames, fuses and misses the same
as with the numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from headprune.errors import HeadpruneError
from headprune.family import Family
from headprune.io.shards import Piece, StoredTensor, first_numbers, same_bytes
from headprune.model.reading import damage_is, needs_package
from headprune.runtime.modeling_headprune import find_attention
from headprune.tensors.dtypes import SAFETENSORS

SAMPLE = 64  # numbers of every output projection in the fingerprint
_SAMPLE = "headprune_sample"  # of a weight on the meta device: these numbers


class Unmapped(HeadpruneError):
    """A tensor of a model, made of several tensors of its checkpoint."""


def below_base(net: PreTrainedModel, name: str) -> str:
    """Return a name without the base model's prefix, which models without a head lack."""
    return name.removeprefix(f"{net.base_model_prefix}.")


def either_way(net: PreTrainedModel, name: str) -> tuple[str, str, str]:
    """Return a name as it is, without the base model's prefix, and with it."""
    return name, below_base(net, name), f"{net.base_model_prefix}.{name}"


def without_weights(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model on the meta device.

    Raises:
        CheckpointError: If the class cannot be built from this config.
    """
    name = config.name_or_path
    refusal = f"The config of '{name}' is damaged, as no {cls.__name__} can be built from it"
    refused = damage_is(lambda why: needs_package(name, why) or f"{refusal}: {why}.")
    with refused, torch.device("meta"):
        with no_init_weights():  # which takes half of the time
            net = cls(copy.deepcopy(config))
        net.tie_weights(recompute_mapping=False)  # initialisation would have done it
        return net


def built(
    cls: type[PreTrainedModel],
    model: str | Path,
    config: PreTrainedConfig,
    tensors: Mapping[str, StoredTensor],
    options: Mapping[str, Any],
    family: Family | None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Build a model on the meta device from headers, with the loading info of transformers.

    ``family`` is its row, by which the numbers of the fingerprint are noted.

    Raises:
        Unmapped: If an output projection is no tensor of the checkpoint.
    """
    empty = {
        name: torch.empty(tensor.shape, dtype=SAFETENSORS[tensor.dtype], device="meta")
        for name, tensor in tensors.items()
    }
    net, info = _filled(cls, model, config, empty, {**options, "device_map": {"": "meta"}})
    _tie_same(net, tensors)
    if family is not None:
        _sample_outputs(net, family.for_runtime(), tensors)
    return net, info


@dataclass(frozen=True)
class _Unread:
    """A tensor of a file in a wider type, read when transformers indexes it."""

    piece: Piece

    def __getitem__(self, index: Any) -> Tensor:
        return self.piece.read()[index]


def widening(
    cls: type[PreTrainedModel],
    model: str | Path,
    config: PreTrainedConfig,
    tensors: Mapping[str, StoredTensor],
    options: Mapping[str, Any],
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a model of a narrower checkpoint in the memory that its weights take.

    transformers alone maps whole files until the last tensor is there, and converts copies.
    Arguments are those of ``built``; ``options`` has the element type as "dtype".
    """
    wide = options["dtype"]
    unread = {
        name: _Unread(Piece(name, None, tensor, None, wide, wide))
        for name, tensor in tensors.items()
    }
    return _filled(cls, model, config, unread, options)


def _filled(
    cls: type[PreTrainedModel],
    model: str | Path,
    config: PreTrainedConfig,
    values: Mapping[str, Tensor | _Unread],
    options: Mapping[str, Any],
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a model from these tensors, with the settings of generation from its folder."""
    given = {"config": config, "state_dict": values, "output_loading_info": True}
    net, info = cls.from_pretrained(None, **{**options, **given})
    if net.can_generate():
        net.generation_config = _generation_config(str(model), options)
    net.name_or_path = net.config.name_or_path = str(model)
    return net, info


def _generation_config(model: str, options: Mapping[str, Any]) -> GenerationConfig:
    """Return the settings of generation: from their file, or else from config.json."""
    hub = ("revision", "cache_dir", "subfolder", "token", "local_files_only", "force_download")
    where = {name: options[name] for name in hub if name in options}
    try:
        return GenerationConfig.from_pretrained(model, **where)
    except OSError:
        old = {"config_file_name": "config.json", "_from_model_config": True}
        return GenerationConfig.from_pretrained(model, **old, **where)


def unpacked(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> PreTrainedModel:
    """Build the model that a quantised checkpoint holds packed, on the meta device.

    Its fingerprint is of its geometry alone.
    """
    plain = copy.deepcopy(config)
    del plain.quantization_config
    net = without_weights(cls, plain).eval()
    for parameter in net.parameters():
        vars(parameter)[_SAMPLE] = torch.zeros(SAMPLE)
    return net


def _tie_same(net: PreTrainedModel, tensors: Mapping[str, StoredTensor]) -> None:
    """Tie equal tensors that a checkpoint holds twice, as loading with numbers does."""
    names = Names.of(net)
    for target, source in list(net.all_tied_weights_keys.items()):
        tied = net.get_parameter_or_buffer(source)
        if net.get_parameter_or_buffer(target) is tied:
            continue
        if same_bytes(*(names.source(net, name, tensors) for name in (target, source))):
            path, _, name = target.rpartition(".")
            setattr(net.get_submodule(path), name, tied)
        else:
            del net.all_tied_weights_keys[target]


def sample_of(weight: Tensor) -> Tensor:
    """Return the first numbers of a weight; those of one on the meta device were noted."""
    if weight.is_meta:
        noted: Tensor = vars(weight)[_SAMPLE]
        return noted
    return weight.detach().flatten()[:SAMPLE]


def _sample_outputs(
    net: PreTrainedModel, family: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> None:
    """Note the first numbers of every output projection for the fingerprint."""
    try:
        attentions = find_attention(net, family)
    except ValueError:  # attention_of says it better
        return
    names = Names.of(net)
    for attention in attentions:
        path = next(p.path for p in attention.projections if p.holds == "o")
        source = names.source(net, f"{path}.weight", tensors)
        weight = attention.output_projection.get_parameter("weight")
        vars(weight)[_SAMPLE] = first_numbers(source, SAMPLE)


@dataclass(frozen=True)
class Names:
    """The names of a model's tensors on disk, once it is saved.

    Attributes:
        tensors: The saved tensors by their names on disk.
        disk: Names on disk by names in the model; without fused and split tensors.
    """

    tensors: dict[str, Tensor]
    disk: dict[str, str]

    @classmethod
    def of(cls, net: PreTrainedModel) -> Names:
        """Return the names by which ``save_pretrained`` would save a loaded model."""
        state = net.state_dict()
        for name in net._keys_to_ignore_on_save or ():
            state.pop(name, None)
        state = remove_tied_weights_from_state_dict(state, net)
        names = {id(tensor): name for name, tensor in state.items()}
        tensors = revert_weight_conversion(net, state)
        return cls(tensors, {names[id(t)]: n for n, t in tensors.items() if id(t) in names})

    def source(
        self, net: PreTrainedModel, live: str, tensors: Mapping[str, StoredTensor]
    ) -> StoredTensor:
        """Return the tensor of the checkpoint that the model has as ``live``.

        Raises:
            Unmapped: If there is none.
        """
        if live not in self.disk:
            raise Unmapped(f"'{live}' is made of several tensors of the checkpoint.")
        disk = self.disk[live]
        return stored_as(net, disk, tuple(self.tensors[disk].shape), tensors)


def stored_as(
    net: PreTrainedModel, disk: str, shape: tuple[int, ...], tensors: Mapping[str, StoredTensor]
) -> StoredTensor:
    """Return the tensor that a checkpoint has under a name, with the prefix or without.

    Raises:
        Unmapped: If there is none of that shape.
    """
    for name in either_way(net, disk):
        if name in tensors and tensors[name].shape == shape:
            return tensors[name]
    raise Unmapped(f"The checkpoint has no tensor '{disk}' of shape {list(shape)}.")
