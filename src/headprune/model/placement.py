"""Where a model lies: put on the device of the command, and told where its inputs go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from headprune import devices
from headprune.errors import FamilyError
from headprune.model.residency import residency_of

Model = TypeVar("Model", bound=nn.Module)


def placed(model: Model) -> Model:
    """Puts a loaded model on the device of the command, where layers and shards are already."""
    devices.announce()
    there = residency_of(model) is not None or is_sharded(model)
    return model if there else model.to(devices.chosen())


def is_sharded(net: nn.Module) -> bool:
    """Whether this process holds shards of a model."""
    return isinstance(net, FSDPModule)


def reshard(net: nn.Module) -> None:
    """Leaves of a model in shards nothing whole, as the last layer is after a forward pass.

    What is set on whole weights, such as that they are frozen, is forgotten with them.
    """
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_class(net: PreTrainedModel) -> type[PreTrainedModel]:
    """The class of a model; of one in shards, that which it would have without."""
    own: type[PreTrainedModel] = type(net).__bases__[-1] if is_sharded(net) else type(net)
    return own


@contextmanager
def alone_on_device(model: nn.Module) -> Iterator[None]:
    """Has a model on the device of the command for a while, and then where it was before.

    The device then counts its largest use of memory from the model's arrival.
    """
    device, before = devices.chosen(), input_device(model)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        placed(model)
        yield
    finally:
        if not residency_of(model):
            model.to(before)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def input_device(model: nn.Module) -> torch.device:
    """Where a model takes its inputs: where its first weights lie.

    Weights that wait elsewhere are on "meta"; they are computed with on the device of the command.
    """
    there = (p.device for p in model.parameters() if p.device.type != "meta")
    return next(there, None) or devices.chosen()


def on_device(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs, the tensors among them where the model takes them."""
    device = input_device(model)
    return {n: v.to(device) if isinstance(v, Tensor) else v for n, v in inputs.items()}


def refuse_spread(model: nn.Module) -> None:
    """Refuses a model of which this process does not hold whole weights.

    Raises:
        FamilyError: Saying how it is spread, and what to do instead.
    """
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise FamilyError(
            f"{type(model).__name__} is split by tensor parallelism, so that every process holds "
            "parts of heads. Load it without tp_plan."
        )
    for name, module in model.named_modules():
        if getattr(getattr(module, "_hf_hook", None), "offload", False):
            raise FamilyError(
                f"'{name}' of {type(model).__name__} is offloaded by accelerate, which would lose "
                "what is written to it. Load it without offloading (device_map)."
            )


@contextmanager
def without_tf32() -> Iterator[None]:
    """Has products in float32 computed in float32, which a GPU may round to 10 bits."""
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    # the settings of torch 2.9 and later; the older ones may not be read once these were used
    name = "fp32_precision" if hasattr(matmul, "fp32_precision") else "allow_tf32"
    exact = "ieee" if name == "fp32_precision" else False
    places = [matmul, cudnn.conv, cudnn.rnn] if name == "fp32_precision" else [matmul, cudnn]
    before = [getattr(place, name) for place in places]
    try:
        for place in places:
            setattr(place, name, exact)
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            setattr(place, name, value)
