"""The element type that a command computes in.

A proof computes in float32. Half-precision numbers are float32 numbers too, so the model is the
same; its outputs differ by 1e-6 from those of another order of summation. bfloat16 would leave
1e-2, which hides wrong cuts. Calibration runs in bfloat16 where the device multiplies it: sums over
many tokens average its rounding out.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.config import Dtype
from headprune.errors import CheckpointError, FamilyError, HeadpruneError
from headprune.model import probes
from headprune.model.placement import is_sharded, on_device
from headprune.model.reading import damage_is
from headprune.model.residency import residency_of
from headprune.model.stored import StoredDtypes
from headprune.tensors.dtypes import dtype_name


def compute_dtype(
    asked: Dtype, stored: torch.dtype | None, keep_bfloat16: bool = False
) -> torch.dtype:
    """Return the element type to compute in.

    Args:
        asked: The value of ``dtype``.
        stored: Element type of the checkpoint; None if unknown.
        keep_bfloat16: Whether "auto" leaves bfloat16 as it is.
    """
    if asked is not Dtype.AUTO:
        given: torch.dtype = getattr(torch, asked.value)
        return given
    if keep_bfloat16 and stored is torch.bfloat16:
        return stored
    return torch.promote_types(stored or torch.float32, torch.float32)


def refuse_missing_dtype(dtype: torch.dtype, device: torch.device | str) -> None:
    """Refuse an element type that a device cannot compute in.

    Raises:
        HeadpruneError: With both.
    """
    try:
        ones = torch.ones(2, 2, device=device, dtype=dtype)
        nn.functional.softmax(ones @ ones, dim=-1)
    except (RuntimeError, TypeError):
        name = dtype_name(dtype)
        raise HeadpruneError(
            f"dtype {name}: the device '{device}' cannot compute in {name}. Use dtype=float32."
        ) from None


@torch.no_grad()
def refuse_not_finite(net: PreTrainedModel, model: str | Path, instead: str | None = None) -> None:
    """Run a model once on probe inputs, and refuse outputs that are not finite.

    Args:
        net: The model.
        model: Its folder or hub id.
        instead: Advice about an overflow; None for one that fits the type of ``net``.

    Raises:
        CheckpointError: With the damaged tensor, if one is.
    """
    try:
        inputs = probes.probe_inputs(net)
    except FamilyError:  # nothing to try it on
        return
    inputs = on_device(net, probes.in_dtype(inputs, net.dtype))
    runs = damage_is(
        lambda why: (
            f"'{model}' does not run as the {type(net).__name__} that its config.json "
            f"names: {why.rstrip('.')}. Look at that config, or get the folder again."
        )
    )
    with runs:
        result = net(**inputs)
    if all(_finite(output) for output in result.values() if isinstance(output, Tensor)):
        return
    for name, parameter in net.named_parameters():
        if not parameter.is_meta and not _finite(parameter):
            raise CheckpointError(
                f"'{name}' of '{model}' holds NaN or infinity: the checkpoint is damaged. Get it "
                "again."
            )
    half = net.dtype in (torch.float16, torch.bfloat16)
    instead = instead or f"Compute in another type: dtype={'float32' if half else 'float64'}."
    raise CheckpointError(
        f"'{model}' overflows in {dtype_name(net.dtype)}: its outputs are not finite. {instead}"
    )


def _finite(values: Tensor) -> bool:
    return not values.is_floating_point() or bool(values.isfinite().all())


def refuse_unwritable(net: PreTrainedModel, model: str | Path, stored: StoredDtypes) -> None:
    """Refuse a model that overflows in the types it will be written in, before any work.

    A model in float16, whose numbers end at 65,504, is run in it.

    Raises:
        CheckpointError: With the weight, if one overflows.
    """
    stored.refuse_overflow(net)
    if stored.default is not torch.float16 or net.dtype is torch.float16:
        return
    if residency_of(net) or is_sharded(net):  # a copy does not fit
        return
    trial, whole = copy.deepcopy(net), set(net._keep_in_fp32_modules or ())
    kept = {n: torch.float32 for n in trial.state_dict() if whole & set(n.split("."))}
    replace(stored, exceptions={**stored.exceptions, **kept}).cast(trial)
    try:
        refuse_not_finite(trial, model, "Write another type: --config out_dtype=bfloat16.")
    except CheckpointError as error:
        if "Half" not in str(error.__cause__):  # this machine cannot compute in float16
            raise


def to_float32(net: PreTrainedModel) -> PreTrainedModel:
    """Return the model in float32 at least, in place, as if it had been loaded so.

    Buffers that no checkpoint holds are computed anew: they were rounded in half precision.
    """
    wide = torch.promote_types(net.dtype, torch.float32)
    if net.dtype is wide:
        return net
    with init_empty_weights(include_buffers=False):
        fresh = dict(type(net)(net.config).named_buffers())
    net.to(wide)
    saved = net.state_dict()
    for name, buffer in net.named_buffers():
        if name not in saved and buffer.is_floating_point():
            buffer.data = fresh[name].to(buffer.device)
    return net
