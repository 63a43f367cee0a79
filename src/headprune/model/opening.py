"""A model loaded to be worked on: whole, known, finite, in the element type of the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import devices
from headprune.config import Dtype
from headprune.context import Allowed
from headprune.errors import CheckpointError
from headprune.model.attention import identity
from headprune.model.loading import from_pretrained, load_config
from headprune.model.placement import placed, reshard
from headprune.model.precision import (
    compute_dtype,
    refuse_missing_dtype,
    refuse_not_finite,
    refuse_unwritable,
)
from headprune.model.refusals import refuse_quantised
from headprune.model.residency import Residency
from headprune.model.sharding import load_sharded
from headprune.model.skeleton import Unmapped
from headprune.model.stored import (
    StoredDtypes,
    commonest_dtype,
    fetch_weights,
    refuse_quantised_tensors,
    stored_dtypes,
    stored_tensors,
)
from headprune.placements import Placement, asked_placement, by_layers, in_shards
from headprune.schemas.plan import ModelIdentity


def load(
    model: str | Path,
    dtype: Dtype,
    allowed: Allowed = Allowed(),
    keep_bfloat16: bool = False,
    weights: bool = True,
) -> tuple[PreTrainedModel, ModelIdentity]:
    """Loads a model to be worked on, and says who it is.

    Args:
        model: Folder or hub id.
        dtype: Element type to compute in; "auto" is float32 for a checkpoint in half precision.
        allowed: What the model may bring.
        keep_bfloat16: Whether "auto" leaves bfloat16 as it is.
        weights: Whether its weights are needed; the headers of its files are enough to plan a cut.

    Raises:
        HeadpruneError: If it cannot be loaded as a whole, or does not compute finite numbers.
    """
    trust = {"trust_remote_code": allowed.trust_remote_code}
    config = load_config(model, **trust)
    refuse_quantised(model, config)
    fetch_weights(model)
    tensors = stored_tensors(model)
    refuse_quantised_tensors(model, tensors)
    held = commonest_dtype(tensors) or getattr(config, "dtype", None)
    computing = compute_dtype(dtype, held, keep_bfloat16)
    refuse_missing_dtype(computing, devices.chosen())
    options = {**trust, "drop_unexpected": allowed.drop_unexpected}
    if weights:
        net = placed(as_it_fits(model, computing, **options))
    else:
        net = from_pretrained(model, dtype=computing, weights=False, **options)
    net.headprune_checkpoint_dtype = held  # where files of the hub's cache are not found again
    if weights:
        refuse_not_finite(net, model)
        reshard(net)
    return net, identity(net, model)


def as_it_fits(model: str | Path, dtype: torch.dtype | str, **options: Any) -> PreTrainedModel:
    """Loads a model, whole, in shards or to be run layer by layer, as the command asks for.

    Args:
        model: Folder or hub id.
        dtype: Element type to compute in.
        **options: Other arguments of ``headprune.from_pretrained``.

    Raises:
        CheckpointError: If it cannot be loaded, or be run as was asked for.
    """
    if in_shards():
        return load_sharded(model, dtype=dtype, **options)
    fetch_weights(model)
    tensors = stored_tensors(model)
    size = sum(tensor.bytes for tensor in tensors.values())
    if isinstance(dtype, torch.dtype):
        size = sum(tensor.elements for tensor in tensors.values()) * dtype.itemsize
    if by_layers(size):
        net = from_pretrained(model, dtype=dtype, weights=False, **options)
        try:
            if net.device.type != "meta":
                raise Unmapped("Some output projections are no tensors of the checkpoint.")
            Residency(net, tensors, devices.chosen()).attach()
            return net
        except Unmapped as why:
            if asked_placement() is Placement.LAYERS:
                raise CheckpointError(
                    f"placement=layers: '{model}' cannot be read layer by layer. {why} Use "
                    "--config placement=whole."
                ) from None
    return from_pretrained(model, dtype=dtype, **options)


def result_dtypes(net: PreTrainedModel, model: str | Path, out_dtype: Dtype) -> StoredDtypes:
    """The element types that a result is written in.

    Args:
        net: The model.
        model: Where it came from.
        out_dtype: The value of ``--out-dtype``; "auto" keeps those of the checkpoint.

    Raises:
        CheckpointError: If the model overflows in them.
    """
    stored = stored_dtypes(net, stored_tensors(model))
    if out_dtype is not Dtype.AUTO:
        stored = StoredDtypes(getattr(torch, out_dtype.value))
    if net.device.type != "meta":
        refuse_unwritable(net, model, stored)
    return stored
