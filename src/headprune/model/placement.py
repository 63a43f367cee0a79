"""The place of a model and of its inputs: a device, layers that come and go, or shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from headprune import devices, processes
from headprune.errors import FamilyError, HeadpruneError
from headprune.model.residency import residency_of

Model = TypeVar("Model", bound=nn.Module)

# versions that load in shards, and average the gradients of plain parameters beside them
SINCE = {"transformers": "5.19", "torch": "2.8"}


def move_to_device(model: Model) -> Model:
    """Put a loaded model on the device of the command, where layers and shards are already."""
    devices.announce()
    stays = residency_of(model) is not None or is_sharded(model)
    return model if stays else model.to(devices.chosen())


def is_sharded(net: nn.Module) -> bool:
    """Return whether this process holds shards of a model."""
    return isinstance(net, FSDPModule)


def reshard(net: nn.Module) -> None:
    """Reshard the last layer, which stays whole after a forward pass.

    Settings of whole weights, such as ``requires_grad``, are lost with them.
    """
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_class(net: PreTrainedModel) -> type[PreTrainedModel]:
    """Return the class of a model, without the one that sharding makes."""
    cls: type[PreTrainedModel] = type(net).__bases__[-1] if is_sharded(net) else type(net)
    return cls


@contextmanager
def alone_on_device(model: nn.Module) -> Iterator[None]:
    """Put a model on the device of the command in a ``with`` block, and reset its peak memory."""
    device, former = devices.chosen(), input_device(model)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        move_to_device(model)
        yield
    finally:
        if not residency_of(model):
            model.to(former)
        if device.type == "cuda" and former.type != "cuda":
            torch.cuda.empty_cache()


@contextmanager
def together_on_device(models: Sequence[PreTrainedModel]) -> Iterator[None]:
    """Keep models on the device of the command in a ``with`` block, if half of its memory does."""
    device, size = devices.chosen(), sum(model.get_memory_footprint() for model in models)
    with ExitStack() as stack:
        if device.type != "cuda" or size < torch.cuda.mem_get_info(device)[1] / 2:
            for model in models:
                stack.enter_context(alone_on_device(model))
        yield


def input_device(model: nn.Module) -> torch.device:
    """Return the device of a model's first weights; weights on "meta" are filled on demand."""
    present = (p.device for p in model.parameters() if p.device.type != "meta")
    return next(present, None) or devices.chosen()


def on_device(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs with their tensors on the model's device."""
    device = input_device(model)
    return {n: v.to(device) if isinstance(v, Tensor) else v for n, v in inputs.items()}


def refuse_spread(model: nn.Module) -> None:
    """Refuse a model whose weights are not whole in this process.

    Raises:
        FamilyError: With the way it is spread.
    """
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise FamilyError(
            f"{type(model).__name__} is split by tensor parallelism. Load it without tp_plan."
        )
    for name, module in model.named_modules():
        if getattr(getattr(module, "_hf_hook", None), "offload", False):
            raise FamilyError(
                f"'{name}' of {type(model).__name__} is offloaded by accelerate, which would lose "
                "new weights. Load it without offloading (device_map)."
            )


@contextmanager
def without_tf32() -> Iterator[None]:
    """Compute float32 products in float32, which a GPU may round to 10 bits."""
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


def refuse_to_shard() -> None:
    """Refuse to shard without several processes, recent libraries, and their accelerator.

    Raises:
        HeadpruneError: Naming the missing memory or package.
    """
    if processes.count() == 1:
        raise HeadpruneError(
            "--shard splits a model over processes, and one was started. Use 'torchrun "
            "--nproc-per-node N -m headprune ...', or leave out --shard."
        )
    installed = {"transformers": transformers.__version__, "torch": torch.__version__}
    for name, since in SINCE.items():
        if Version(Version(installed[name]).base_version) < Version(since):
            raise HeadpruneError(
                f"--shard needs {name} {since}, and {installed[name]} is installed. Update it, or "
                "leave out --shard, if every GPU holds the whole model."
            )
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and devices.chosen().type != accelerator.type:
        raise HeadpruneError(
            f"--shard splits a model over accelerators where there are some, and --device is "
            f"{devices.chosen()}. Give --device {accelerator.type}, or leave out --shard."
        )
