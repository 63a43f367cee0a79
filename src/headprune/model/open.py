"""A model opened once: config, headers and identity at once, weights when they are needed."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoFeatureExtractor, AutoImageProcessor, PreTrainedConfig, PreTrainedModel

from headprune import devices, processes
from headprune.config import Dtype
from headprune.context import Allowed
from headprune.errors import CheckpointError
from headprune.io.shards import StoredTensor
from headprune.model.attention import attention_of, identity
from headprune.model.batch import SpeechProcessor, modality_of, task_of
from headprune.model.embedding import read_as_embedded
from headprune.model.loading import (
    assemble,
    from_pretrained,
    load_config,
    load_extractor,
    load_tokenizer,
    native_of,
    refuse_absent_weights,
)
from headprune.model.placement import move_to_device, reshard
from headprune.model.precision import (
    compute_dtype,
    refuse_missing_dtype,
    refuse_not_finite,
    refuse_unwritable,
)
from headprune.model.refusals import quantised_by, refuse_quantised
from headprune.model.residency import Residency, residency_of
from headprune.model.skeleton import Unmapped, unpacked
from headprune.model.stored import (
    StoredDtypes,
    commonest_dtype,
    fetch_weights,
    refuse_quantised_tensors,
    stored_dtypes,
    stored_tensors,
    uniform,
)
from headprune.placements import Placement, asked_placement, by_layers, in_shards
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.plan import ModelIdentity


@dataclass
class Model:
    """A model opened once; every stage takes it.

    Attributes:
        source: Folder or hub id.
        config: Its config, as it was read.
        tensors: Its tensors on disk by their names there: type, shape and place, no numbers.
        dtype: Element type to compute in.
        allowed: Permissions that it was opened with.
        by_layers: Whether it runs layer by layer, if it can, whatever the free memory.
        packed: Whether its weights are quantised: they are carried over, and never read.
    """

    source: str | Path
    config: PreTrainedConfig
    tensors: dict[str, StoredTensor]
    dtype: torch.dtype | str
    allowed: Allowed = Allowed()
    by_layers: bool = False
    packed: bool = False

    @cached_property
    def skeleton(self) -> PreTrainedModel:
        """The model on the meta device; with weights where its headers do not describe it."""
        if self.packed:
            return unpacked(self.config, native_of(self.config))
        if not self.is_loaded:
            return self._assembled(weights=False)
        try:
            return self._assembled(weights=None)
        except Unmapped:
            return self.net

    @cached_property
    def net(self) -> PreTrainedModel:
        """The model with its weights, on the device of the command, in eval mode.

        Raises:
            CheckpointError: If it does not load, or does not compute finite numbers.
        """
        net = move_to_device(self.weighted())
        refuse_not_finite(net, self.source)
        reshard(net)
        return net

    @cached_property
    def identity(self) -> ModelIdentity:
        """Name, classes and fingerprint."""
        return identity(self.any_net, self.source)

    @cached_property
    def tokenizer(self) -> Any:
        """Its tokenizer; of images or sound, what makes its inputs.

        Raises:
            CheckpointError: If there is none.
        """
        trust = self.allowed.trust_remote_code
        how: dict[str, Any] = {"trust_remote_code": trust}
        modality = modality_of(self.any_net)
        if modality == "images":
            return load_extractor(AutoImageProcessor, self.source, **how)
        if modality == "sound":
            extractor = load_extractor(AutoFeatureExtractor, self.source, **how)
            if self.task not in ("seq2seq-lm", "ctc"):
                return SpeechProcessor(extractor)
            return SpeechProcessor(extractor, load_tokenizer(self.source, self.config, **how))
        tokenizer = load_tokenizer(self.source, self.config, **how)
        return read_as_embedded(tokenizer, self.source) if self.task == "features" else tokenizer

    @cached_property
    def task(self) -> str:
        """The task of its head: "causal-lm", "classification" and so on."""
        return task_of(self.any_net)

    @property
    def attentions(self) -> list[Attention]:
        """Its attention modules before any edit, first layer first; of ``net`` once loaded."""
        return attention_of(self.any_net)

    @property
    def checkpoint_dtype(self) -> torch.dtype | None:
        """Element type of most of its weights on disk, or else of its config."""
        return commonest_dtype(self.tensors) or getattr(self.config, "dtype", None)

    def result_dtypes(self, out_dtype: Dtype = Dtype.AUTO) -> StoredDtypes:
        """Return the element types to write; "auto" keeps those of the checkpoint.

        Raises:
            CheckpointError: If the loaded model overflows in them.
        """
        if self.packed:
            return StoredDtypes(self.config.dtype or torch.bfloat16)
        stored = stored_dtypes(self.any_net, self.tensors, self.checkpoint_dtype)
        if out_dtype is not Dtype.AUTO:
            stored = StoredDtypes(getattr(torch, out_dtype.value))
        if self.any_net.device.type != "meta":
            refuse_unwritable(self.any_net, self.source, stored)
        return stored

    def check_tensors(self) -> None:
        """Refuse tensors that its class does not take, and tensors that it lacks.

        Raises:
            CheckpointError: Naming the first of them.
        """
        state = self.skeleton.state_dict()
        for name, tensor in self.tensors.items() if self.packed else ():
            plain = name in state and tensor.dtype in ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
            if plain and tuple(state[name].shape) != tensor.shape:
                raise CheckpointError(
                    f"'{self.source}': '{name}' has the shape {list(tensor.shape)}, and its config "
                    f"describes {list(state[name].shape)}. Get the folder again."
                )

    def to_float32(self, by_layers: bool = True) -> Model:
        """Return it in float32 at least: opened anew if it is narrower, to run layer by layer.

        One that runs so is widened in place (``precision.to_float32``).
        """
        net, own = self.any_net, self.dtype
        if self.is_loaded:
            own = net.dtype
        elif not isinstance(own, torch.dtype):  # a skeleton may be cast to the type of the result
            own = self.checkpoint_dtype or net.dtype
        wide = torch.promote_types(own, torch.float32)
        if own is wide or residency_of(net) is not None or in_shards():
            return self
        by_layers = by_layers and asked_placement() is not Placement.WHOLE
        return replace(self, dtype=wide, by_layers=by_layers)

    def release(self) -> None:
        """Drop both nets: a writer spends them."""
        vars(self).pop("net", None)
        vars(self).pop("skeleton", None)

    @property
    def is_loaded(self) -> bool:
        """True if the weights are loaded."""
        return "net" in vars(self)

    @property
    def any_net(self) -> PreTrainedModel:
        """The loaded net, or else the skeleton."""
        return self.net if self.is_loaded else self.skeleton

    @property
    def _options(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "trust_remote_code": self.allowed.trust_remote_code}

    def _assembled(self, weights: bool | None) -> PreTrainedModel:
        return assemble(
            self.source,
            copy.deepcopy(self.config),
            self.tensors,
            dropping=self.allowed.drop_unexpected,
            weights=weights,
            **self._options,
        )[0]

    def _sharded(self) -> PreTrainedModel:
        from transformers.distributed import DistributedConfig

        processes.join()
        net: PreTrainedModel = from_pretrained(
            self.source,
            distributed_config=DistributedConfig(fsdp_size=processes.count()),
            drop_unexpected=self.allowed.drop_unexpected,
            **self._options,
        )
        return net

    def weighted(self) -> PreTrainedModel:
        """Load the weights: whole, in shards, or to be run layer by layer, as the command says."""
        built = vars(self).get("skeleton")
        if built is not None and built.device.type != "meta":
            loaded: PreTrainedModel = vars(self).pop("skeleton")
            return loaded
        if in_shards():
            return self._sharded()
        tensors = self.tensors.values()
        size = sum(tensor.bytes for tensor in tensors)
        if isinstance(self.dtype, torch.dtype):
            size = sum(tensor.elements for tensor in tensors) * self.dtype.itemsize
        if self.by_layers or by_layers(size):
            net = self._assembled(weights=False)
            try:
                if net.device.type != "meta":
                    raise Unmapped("Some output projections are no tensors of the checkpoint.")
                Residency(net, self.tensors, devices.chosen()).attach()
                return net
            except Unmapped as why:
                if asked_placement() is Placement.LAYERS:
                    raise CheckpointError(
                        f"placement=layers: '{self.source}' cannot be read layer by layer. "
                        f"{why} Use --config placement=whole."
                    ) from None
        return self._assembled(weights=True)


def read_model(
    source: str | Path, dtype: torch.dtype | str = "auto", allowed: Allowed = Allowed()
) -> Model:
    """Read the config and the headers of a model; quantised ones too.

    Args:
        source: Folder or hub id.
        dtype: Element type to compute in; "auto" is that of the checkpoint.
        allowed: Permissions: code that comes with it, tensors to leave out.

    Raises:
        HeadpruneError: If it cannot be read.
    """
    config = load_config(source, trust_remote_code=allowed.trust_remote_code)
    refuse_absent_weights(source)
    fetch_weights(source)
    return Model(source, config, stored_tensors(source), dtype, allowed)


def open_model(
    source: str | Path,
    dtype: Dtype | torch.dtype = Dtype.AUTO,
    allowed: Allowed = Allowed(),
    calibrates: bool = False,
    packed: bool = False,
) -> Model:
    """Open a model to work on it.

    Args:
        source: Folder or hub id.
        dtype: Element type to compute in; "auto" is float32 for a checkpoint in half precision.
        allowed: Permissions: code that comes with it, tensors to leave out.
        calibrates: Text is run through it and its weights stay: "auto" leaves bfloat16 as it is
            where the device multiplies that without emulation, and no tensor has another type.
        packed: Whether a quantised model will do.

    Raises:
        HeadpruneError: If it cannot be read, or is quantised.
    """
    model = read_model(source, allowed=allowed)
    model.packed = packed and quantised_by(model.config) is not None
    if model.packed:
        return model
    refuse_quantised(source, model.config)
    refuse_quantised_tensors(source, model.tensors)
    if isinstance(dtype, Dtype):
        keep = calibrates and devices.computes_bfloat16() and uniform(model.tensors)
        dtype = compute_dtype(dtype, model.checkpoint_dtype, keep)
    refuse_missing_dtype(dtype, devices.chosen())
    model.dtype = dtype
    return model


def load(
    model: str | Path, dtype: Dtype, allowed: Allowed = Allowed()
) -> tuple[PreTrainedModel, ModelIdentity]:
    """Load a model to work on it, and name it; see ``open_model``."""
    opened = open_model(model, dtype, allowed)
    return opened.net, opened.identity
