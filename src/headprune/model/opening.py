"""A model loaded to be worked on: whole, known, finite, in the element type of the command."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from headprune import devices
from headprune.config import Dtype
from headprune.model.attention import identity, refuse_unknown_settings
from headprune.model.loading import from_pretrained, load_config
from headprune.model.placement import placed
from headprune.model.precision import (
    compute_dtype,
    refuse_missing_dtype,
    refuse_not_finite,
    refuse_quantised,
    refuse_unwritable,
)
from headprune.model.stored import (
    StoredDtypes,
    commonest_dtype,
    refuse_quantised_tensors,
    stored_dtypes,
    stored_tensors,
)
from headprune.schemas.plan import ModelIdentity


def load(
    model: str | Path,
    dtype: Dtype,
    trust_remote_code: bool,
    assume_supported: bool,
    drop_unexpected: bool = False,
    keep_bfloat16: bool = False,
    weights: bool = True,
) -> tuple[PreTrainedModel, ModelIdentity]:
    """Loads a model to be worked on, and says who it is.

    Args:
        model: Folder or hub id.
        dtype: Element type to compute in; "auto" is float32 for a checkpoint in half precision.
        trust_remote_code: Allow code that comes with the model.
        assume_supported: Go on where the config has settings that the family's row does not know.
        drop_unexpected: Go on without tensors of the checkpoint that the model's class does not
            take.
        keep_bfloat16: Whether "auto" leaves bfloat16 as it is.
        weights: Whether its weights are needed; the headers of its files are enough to plan a cut.

    Raises:
        HeadpruneError: If it cannot be loaded as a whole, or does not compute finite numbers.
    """
    config = load_config(model, trust_remote_code=trust_remote_code)
    refuse_quantised(model, config)
    tensors = stored_tensors(model)
    refuse_quantised_tensors(model, tensors)
    held = commonest_dtype(tensors) or getattr(config, "dtype", None)
    computing = compute_dtype(dtype, held, keep_bfloat16)
    refuse_missing_dtype(computing, devices.chosen())
    net = from_pretrained(
        model,
        dtype=computing,
        trust_remote_code=trust_remote_code,
        drop_unexpected=drop_unexpected,
        weights=weights,
    )
    if weights:
        net = placed(net)
    net.headprune_checkpoint_dtype = held  # where files of the hub's cache are not found again
    if not assume_supported:
        refuse_unknown_settings(net.config)
    if weights:
        refuse_not_finite(net, model)
    return net, identity(net, model)


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
