"""Models without weights, built from config and headers alone, and what their tensors are on disk.

transformers' own loader builds them, from tensors without numbers: what it renames, fuses, misses
and finds superfluous is the same as when it reads the numbers.
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
from headprune.family import FAMILIES
from headprune.io.shards import StoredTensor, converted, first_numbers, same_bytes
from headprune.model.base_names import either_way
from headprune.model.reading import damage_is, needs_package
from headprune.runtime.modeling_headprune import find_attention
from headprune.tensors.dtypes import SAFETENSORS

SAMPLE = 64  # numbers of every output projection that tell models apart
_SAMPLE = "headprune_sample"  # of a weight that is not there: these numbers


class Unmapped(HeadpruneError):
    """A tensor of a model that is no tensor of its checkpoint, but made of several."""


def without_weights(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Builds a model that takes no memory.

    Raises:
        CheckpointError: If the class cannot be built from this config.
    """
    name = config.name_or_path
    refusal = f"The config of '{name}' is damaged, as no {cls.__name__} can be built from it"
    refused = damage_is(lambda why: needs_package(name, why) or f"{refusal}: {why}.")
    with refused, torch.device("meta"):
        with no_init_weights():  # half of the time, for numbers that nothing holds
            net = cls(copy.deepcopy(config))
        net.tie_weights(recompute_mapping=False)  # it would have been a part of that
        return net


def built(
    cls: type[PreTrainedModel],
    model: str | Path,
    config: PreTrainedConfig,
    tensors: Mapping[str, StoredTensor],
    options: Mapping[str, Any],
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Builds a model on the meta device, and says what its checkpoint lacks and has beyond it.

    Args:
        cls: Its class.
        model: Folder or hub id.
        config: Its config.
        tensors: What its checkpoint holds.
        options: Other arguments of ``from_pretrained``.

    Raises:
        Unmapped: If an output projection is no tensor of the checkpoint.
    """
    empty = {
        name: torch.empty(tensor.shape, dtype=SAFETENSORS[tensor.dtype], device="meta")
        for name, tensor in tensors.items()
    }
    net, info = _filled(cls, model, config, empty, {**options, "device_map": {"": "meta"}})
    _tie_same(net, tensors)
    if config.model_type in FAMILIES:  # attention_of says it better
        _sample_outputs(net, FAMILIES[config.model_type].for_runtime(), tensors)
    return net, info


@dataclass(frozen=True)
class _Unread:
    """A tensor of a file, read once transformers asks for its numbers."""

    source: StoredTensor
    dtype: torch.dtype

    def __getitem__(self, index: Any) -> Tensor:
        return converted(self.source, self.dtype)[index]


def widening(
    cls: type[PreTrainedModel],
    model: str | Path,
    config: PreTrainedConfig,
    tensors: Mapping[str, StoredTensor],
    options: Mapping[str, Any],
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Loads a model of a narrower checkpoint in the memory that its weights take.

    transformers maps whole files until the last tensor is there, and converts copies of them.

    Args:
        cls: Its class.
        model: Folder or hub id.
        config: Its config.
        tensors: What its checkpoint holds.
        options: Other arguments of ``from_pretrained``, with the element type as "dtype".
    """
    unread = {name: _Unread(tensor, options["dtype"]) for name, tensor in tensors.items()}
    return _filled(cls, model, config, unread, options)


def _filled(
    cls: type[PreTrainedModel],
    model: str | Path,
    config: PreTrainedConfig,
    values: Mapping[str, Tensor | _Unread],
    options: Mapping[str, Any],
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model of these tensors, with what transformers reads beside them in its folder."""
    given = {"config": config, "state_dict": values, "output_loading_info": True}
    net, info = cls.from_pretrained(None, **{**options, **given})
    if net.can_generate():
        net.generation_config = _generation_config(str(model), options)
    net.name_or_path = net.config.name_or_path = str(model)
    return net, info


def _generation_config(model: str, options: Mapping[str, Any]) -> GenerationConfig:
    """The settings of generation where transformers looks for them: config.json is the second."""
    hub = ("revision", "cache_dir", "subfolder", "token", "local_files_only", "force_download")
    where = {name: options[name] for name in hub if name in options}
    try:
        return GenerationConfig.from_pretrained(model, **where)
    except OSError:
        old = {"config_file_name": "config.json", "_from_model_config": True}
        return GenerationConfig.from_pretrained(model, **old, **where)


def _tie_same(net: PreTrainedModel, tensors: Mapping[str, StoredTensor]) -> None:
    """Ties what a checkpoint holds twice, if it is the same, as loading with numbers does."""
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
    """The first numbers of a weight, which a model without weights has noted."""
    if weight.is_meta:
        noted: Tensor = vars(weight)[_SAMPLE]
        return noted
    return weight.detach().flatten()[:SAMPLE]


def _sample_outputs(
    net: PreTrainedModel, family: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> None:
    """Notes the numbers of every output projection that tell models apart."""
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
    """What the tensors of a model are called on disk, once it is saved.

    Attributes:
        tensors: The tensors that are saved, by their names there.
        disk: These names by those in the model; without tensors that are fused or split on the way.
    """

    tensors: dict[str, Tensor]
    disk: dict[str, str]

    @classmethod
    def of(cls, net: PreTrainedModel) -> Names:
        """The names of a model that was loaded, and is saved as ``save_pretrained`` does."""
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
        """The tensor of the checkpoint that one of the model is.

        Args:
            net: The model.
            live: Its name in the model.
            tensors: What the checkpoint holds.

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
    """The tensor of a checkpoint that would be saved under a name, with the prefix or without.

    Raises:
        Unmapped: If there is none of that shape.
    """
    for name in either_way(net, disk):
        if name in tensors and tensors[name].shape == shape:
            return tensors[name]
    raise Unmapped(f"The checkpoint has no tensor '{disk}' of shape {list(shape)}.")
