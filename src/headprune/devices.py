"""The device of a command, by ``--device``.

``auto`` is the accelerator of this machine, or the CPU where there is none that has float64.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headprune.errors import HeadpruneError

if TYPE_CHECKING:
    import torch

AUTO, CPU = "auto", "cpu"
# of x86: each multiplies matrices of a type about as fast as of float32, or faster
_INSTRUCTIONS = {
    "bfloat16": ("avx512_f", "avx512_bf16", "amx_bf16", "avx_ne_convert"),
    "float16": ("avx512_fp16", "amx_fp16"),
}


@dataclass
class _Choice:
    """The device of the command that runs.

    Attributes:
        device: The device.
        say: Called with the line that names it, and with remarks.
        announced: True once it was named.
    """

    device: torch.device
    say: Callable[[str], None]
    announced: bool = False


_CHOICE: ContextVar[_Choice | None] = ContextVar("device", default=None)


@contextmanager
def running_on(option: str, say: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """Run models on a device during a ``with`` block.

    Args:
        option: The value of ``--device``. Within another block, "auto" is that block's device.
        say: Called with a line that names the device, with the first model there.

    Raises:
        HeadpruneError: If there is no such device.
    """
    if option == AUTO and _CHOICE.get() is not None:
        yield
        return
    import torch

    device = _found(option)
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    token = _CHOICE.set(_Choice(device, say))
    try:
        with current:  # kernels of some libraries run on the current device
            yield
    finally:
        _CHOICE.reset(token)


def chosen() -> torch.device:
    """Return the device of the running command; without one, that of "auto"."""
    choice = _CHOICE.get()
    return _found(AUTO) if choice is None else choice.device


def asked() -> str | None:
    """Return the ``--device`` of the command's device; None where "auto" finds the same."""
    device = chosen()
    return None if device == _found(AUTO) else str(device)


def computes_bfloat16() -> bool:
    """Return whether the device multiplies bfloat16 matrices without emulation."""
    import torch

    device = chosen()
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    known = _capabilities() if device.type == CPU else {}
    return any(known.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def emulates(dtype: str) -> bool:
    """Return whether the device is known to emulate products of matrices of a type."""
    if chosen().type != CPU:
        return False
    known = _capabilities()
    able = [known[name] for name in _INSTRUCTIONS.get(dtype, ()) if name in known]
    return bool(able) and not any(able)


def _capabilities() -> Mapping[str, bool]:
    """Return the abilities of the CPU, by name; unknown in older torch."""
    import torch

    known: Mapping[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return known


def announce() -> None:
    """Name the device, once a command."""
    choice = _CHOICE.get()
    if choice is not None and not choice.announced:
        choice.announced = True
        choice.say(f"device: {choice.device}")


def remark(line: str) -> None:
    """Report a line about the device."""
    choice = _CHOICE.get()
    if choice is not None:
        choice.say(line)


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device has no memory left."""
    # MPS, the CUDA driver and cuBLAS have no class for it; torch's is not imported for --help
    words = ("backend out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    by_message = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return by_message or type(error).__name__ == "OutOfMemoryError"


def device_failed(error: BaseException) -> bool:
    """Return whether an accelerator failed and lost its data."""
    by_device = type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)
    return isinstance(error, RuntimeError) and by_device and not out_of_memory(error)


def is_device_failure(error: BaseException) -> bool:
    """Return whether the memory or the device failed, not the input."""
    return isinstance(error, MemoryError) or out_of_memory(error) or device_failed(error)


def _found(option: str) -> torch.device:
    import torch

    # of several processes each has the accelerator of its number
    together, number = "LOCAL_RANK" in os.environ, int(os.environ.get("LOCAL_RANK", "0"))
    names, kind = [CPU], CPU
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        kind = accelerator.type
        names += [f"{kind}:{n}" for n in range(torch.accelerator.device_count())]
    if together and option in names[1:]:
        raise HeadpruneError(
            f"--device {option} is one device, and several processes were started, which take one "
            f"each: give --device {kind}."
        )
    # statistics are in float64, which MPS has not
    automatic = CPU if kind == "mps" else kind
    name = automatic if option == AUTO else option
    if name == kind and kind != CPU:
        name = f"{kind}:{number}"
    if name not in names:
        raise HeadpruneError(
            f"--device {option}: there is no such device here; there are {', '.join(names)}."
        )
    return torch.device(name)
