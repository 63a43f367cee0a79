"""The model to export: its facts at once, its weights on demand."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from headprune.errors import CheckpointError
from headprune.formats.weights import StoredWeights, Weights
from headprune.model.attention import attention_of
from headprune.model.loading import (
    assemble,
    believe_tensors,
    from_pretrained,
    load_config,
    native_of,
    task_of,
    uneven_heads_are_known,
)
from headprune.model.refusals import refuse_quantised
from headprune.model.skeleton import Unmapped, without_weights
from headprune.model.stored import stored_tensors
from headprune.runtime.modeling_headprune import Attention, pruned_class


@dataclass(frozen=True)
class ExportSource:
    """The model to export: its facts at once, its weights on demand.

    Attributes:
        folder: Where it lies.
        config: Its config.
        net: The model without weights, on the meta device.
        weights: Its tensors on disk, read one at a time.
        trust_remote_code: Whether code that comes with the model may run.
    """

    folder: Path
    config: PreTrainedConfig
    net: PreTrainedModel
    weights: Weights
    trust_remote_code: bool = False

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """Its attention modules, with the sizes of their weights, first layer first."""
        return tuple(attention_of(self.net))

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.net.state_dict().items()}

    @property
    def task(self) -> str:
        """The task of its head: "causal-lm", "classification" and so on."""
        return task_of(self.net)

    def load(self, **kwargs: Any) -> PreTrainedModel:
        """The model with its weights, as the runtime computes it; in float32 if not said."""
        options = {"dtype": "float32", **kwargs, "trust_remote_code": self.trust_remote_code}
        net: PreTrainedModel = from_pretrained(self.folder, **options)
        return net

    @torch.no_grad()
    def made_of(self, weights: Mapping[str, Tensor]) -> PreTrainedModel:
        """The model with these weights, where there are some of a name, in float32."""
        net: PreTrainedModel = type(self.net)(copy.deepcopy(self.config)).float().eval()
        for name, parameter in net.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])
        return net


def open_source(folder: Path, trust_remote_code: bool = False) -> ExportSource:
    """Read the facts of a model, and no weights.

    Raises:
        HeadpruneError: If it is no model folder, of no supported family, or quantised.
    """
    config = load_config(folder, trust_remote_code=trust_remote_code)
    refuse_quantised(folder, config)
    how: dict[str, Any] = {"dropping": True, "trust_remote_code": trust_remote_code}
    with suppress(Unmapped, CheckpointError):  # the format names a missing tensor
        tensors = stored_tensors(folder)
        as_stored, _ = assemble(folder, copy.deepcopy(config), tensors, weights=None, **how)
        believe_tensors(as_stored, config)
    net = built(config)
    weights = StoredWeights(folder, net)
    return ExportSource(folder, config, net, weights, trust_remote_code)


def built(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a config, without weights."""
    native = native_of(config)
    uneven = getattr(config, "headprune", None) is not None
    with uneven_heads_are_known():
        return without_weights(pruned_class(native) if uneven else native, config)
