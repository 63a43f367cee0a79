"""The model to export: its facts at once, its weights on demand."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from headprune.errors import CheckpointError, PlanError
from headprune.io.shards import Piece
from headprune.model.attention import attention_of
from headprune.model.loading import (
    assemble,
    believe_tensors,
    from_pretrained,
    load_config,
    native_of,
    uneven_heads_are_known,
)
from headprune.model.refusals import refuse_quantised
from headprune.model.skeleton import Names, Unmapped, either_way, without_weights
from headprune.model.stored import stored_tensors
from headprune.runtime.modeling_headprune import Attention, pruned_class


@dataclass(frozen=True)
class ExportSource:
    """The model to export: its facts at once, its weights on demand.

    Attributes:
        folder: Where it lies.
        config: Its config.
        net: The model without weights, on the meta device.
        weights: Its tensors on disk by their names in ``net``, read one at a time.
        trust_remote_code: Whether code that comes with the model may run.
    """

    folder: Path
    config: PreTrainedConfig
    net: PreTrainedModel
    weights: dict[str, Piece]
    trust_remote_code: bool = False

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """Its attention modules, with the sizes of their weights, first layer first."""
        return tuple(attention_of(self.net))

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.net.state_dict().items()}

    def load(self, **kwargs: Any) -> PreTrainedModel:
        """The model with its weights, as the runtime computes it; in float32 if not said."""
        options = {"dtype": "float32", **kwargs, "trust_remote_code": self.trust_remote_code}
        net: PreTrainedModel = from_pretrained(self.folder, **options)
        return net

    @torch.no_grad()
    def made(self) -> PreTrainedModel:
        """The model of these weights in float32, without reading its folder."""
        net: PreTrainedModel = type(self.net)(copy.deepcopy(self.config)).float().eval()
        for name, parameter in net.named_parameters():
            if name in self.weights:
                parameter.copy_(self.weights[name].read())
        return net

    def on_disk(self) -> tuple[list[Piece], list[str]]:
        """Return all tensors on disk, and the names of missing ones.

        They include tensors that transformers fuses or splits when it loads them.
        """
        names, stored = Names.of(self.net), stored_tensors(self.folder)
        made = names.tensors.keys() - set(names.disk.values())
        fused = {name: Piece.whole(name, stored[name]) for name in sorted(made & stored.keys())}
        missing = (made - fused.keys()) | (names.disk.keys() - self.weights.keys())
        return [*self.weights.values(), *fused.values()], sorted(missing)


def open_source(folder: Path, trust_remote_code: bool = False) -> ExportSource:
    """Read the facts of a model, and no weights.

    Raises:
        HeadpruneError: If it is no model folder, of no supported family, quantised, or if heads
            of it have windows.
    """
    config = load_config(folder, trust_remote_code=trust_remote_code)
    refuse_quantised(folder, config)
    how: dict[str, Any] = {"dropping": True, "trust_remote_code": trust_remote_code}
    with suppress(Unmapped, CheckpointError):  # the format names a missing tensor
        tensors = stored_tensors(folder)
        as_stored, _ = assemble(folder, copy.deepcopy(config), tensors, weights=None, **how)
        believe_tensors(as_stored, config)
    net = built(config)
    if any(attention.window_heads for attention in attention_of(net)):
        raise PlanError(
            f"'{folder}' has KV heads with windows, and sinks before them: transformers runs them, "
            "by the code beside the weights, and no other engine does. Export the model that it "
            "was made from."
        )
    return ExportSource(folder, config, net, _weights(folder, net), trust_remote_code)


def _weights(folder: Path, net: PreTrainedModel) -> dict[str, Piece]:
    """Return the tensors on disk by the names that a model has for them."""
    stored, renamed = stored_tensors(folder), Names.of(net).disk
    found = {}
    for name in net.state_dict():
        called = (renamed.get(name, name), *either_way(net, name))
        on_disk = next((one for one in called if one in stored), None)
        if on_disk is not None:
            found[name] = Piece.whole(name, stored[on_disk])
    return found


def built(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a config, without weights."""
    native = native_of(config)
    uneven = getattr(config, "headprune", None) is not None
    with uneven_heads_are_known():
        return without_weights(pruned_class(native) if uneven else native, config)
