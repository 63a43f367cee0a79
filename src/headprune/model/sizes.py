"""A config makes no model that is larger than the weights beside it."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from headprune.errors import CheckpointError
from headprune.io.shards import StoredTensor
from headprune.model.reading import damage_is, needs_package
from headprune.model.stored import stored_tensors

_LAYERS = re.compile("(layers?|blocks?|stages?|depths?)$")
_ENTRIES = re.compile("(heads?|experts?|labels)$")
_POSITIONS = re.compile("positions?(_embeddings)?$")

# what is believed without a look at the weights
_FEW_LAYERS, _FEW_ENTRIES, _MOST_POSITIONS = 512, 100_000, 2**27

_TIMES = 2  # tied tensors are stored once; packed ones hold up to 16 numbers in one
_TIMES_PACKED = 32
_BESIDES = 2**26  # numbers in heads that start anew, masks and tables


def refuse_large_counts(model: str | Path, content: Mapping[str, Any]) -> None:
    """Refuses a config.json that describes more layers, heads or positions than can be.

    transformers counts up to some of them, layer by layer, as it reads the file.

    Args:
        model: The folder.
        content: Its config.json.

    Raises:
        CheckpointError: Naming the setting.
    """
    for name, count in _numbers(content):
        if _POSITIONS.search(name) and count > _MOST_POSITIONS:
            most, why = _MOST_POSITIONS, "no model has more than"
        elif _LAYERS.search(name) and count > _FEW_LAYERS:
            most, why = len(stored_tensors(model)), "this many tensors are in its weights:"
        elif _ENTRIES.search(name) and count > _FEW_ENTRIES:
            widest = (max(tensor.shape, default=0) for tensor in stored_tensors(model).values())
            most, why = max(widest, default=0), "the widest of its tensors has"
        else:
            continue
        if count > most:
            raise CheckpointError(
                f"The config of '{model}' is damaged: {name} is {str(count)[:20]}, and {why} "
                f"{most:,}. Get it again."
            )


def _numbers(content: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """All whole numbers in a config, each with the name that it, or a list of it, stands under."""
    left: list[tuple[str, Any]] = list(content.items())
    while left:  # a file may be nested as deeply as Python can go
        name, value = left.pop()
        if isinstance(value, dict):
            left += value.items()
        elif isinstance(value, list):
            left += [(name, entry) for entry in value]
        elif isinstance(value, int):
            yield name, value


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


def refuse_larger_than_weights(
    model: str | Path, net: PreTrainedModel, tensors: Mapping[str, StoredTensor]
) -> None:
    """Refuses a model that has many times the numbers of its checkpoint.

    Args:
        model: Folder or hub id.
        net: The model, built without weights.
        tensors: What its checkpoint holds.

    Raises:
        CheckpointError: With both numbers.
    """
    own = {id(tensor): tensor.numel() for tensor in (*net.parameters(), *net.buffers())}
    built, held = sum(own.values()), sum(tensor.elements for tensor in tensors.values())
    packed = getattr(net.config, "quantization_config", None) is not None
    if built > (_TIMES_PACKED if packed else _TIMES) * held + _BESIDES:
        raise CheckpointError(
            f"The config of '{model}' describes a {type(net).__name__} of {built:.4g} numbers, and "
            f"its weights hold {held:.4g}. Get config.json, or the weights, again."
        )
