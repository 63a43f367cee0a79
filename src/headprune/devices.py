"""The device that a command runs its models on: chosen once, by ``--device``.

``auto`` is the accelerator of this machine, or the CPU where there is none that has float64.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headprune.errors import HeadpruneError

if TYPE_CHECKING:
    import torch

AUTO, CPU = "auto", "cpu"
_INSTRUCTIONS = {  # of x86, by what they multiply
    "bfloat16": ("avx512_bf16", "amx_bf16"),
    "float16": ("avx512_fp16", "amx_fp16"),
}


@dataclass
class _Choice:
    """The device of the command that runs.

    Attributes:
        device: The device.
        say: Called with the line that names it, when the first model is put there.
    """

    device: torch.device
    say: Callable[[str], None] | None


_CHOICE: ContextVar[_Choice | None] = ContextVar("device", default=None)


@contextmanager
def running_on(asked: str, say: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """Has models run on a device for the time of a ``with`` block.

    Args:
        asked: The value of ``--device``. Within another block, "auto" is that block's device.
        say: Called with a line that names the device, once a model is put there.

    Raises:
        HeadpruneError: If there is no such device.
    """
    if asked == AUTO and _CHOICE.get() is not None:
        yield
        return
    import torch

    device = _found(asked)
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    token = _CHOICE.set(_Choice(device, say))
    try:
        with current:  # kernels of some libraries run on the current device
            yield
    finally:
        _CHOICE.reset(token)


def chosen() -> torch.device:
    """The device of the command that runs; that of "auto" outside of one."""
    choice = _CHOICE.get()
    return _found(AUTO) if choice is None else choice.device


def computes_bfloat16() -> bool:
    """Whether the device multiplies bfloat16 matrices by itself, several times as fast as others.

    Others emulate it, and are slower with it than with float32.
    """
    import torch

    device = chosen()
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == CPU and _processor_has("bfloat16") is True


def announce(dtype: torch.dtype | None = None) -> None:
    """Says where models run, once a command, and if the device only emulates their element type."""
    choice = _CHOICE.get()
    if choice is not None and choice.say is not None:
        say, choice.say = choice.say, None
        say(f"device: {choice.device}{_slow(choice.device, dtype)}")


def _slow(device: torch.device, dtype: torch.dtype | None) -> str:
    name = str(dtype).removeprefix("torch.")
    if device.type != CPU or name not in _INSTRUCTIONS or _processor_has(name) is not False:
        return ""
    return f", which has no {name} of its own: dtype float32 is several times as fast"


def _processor_has(dtype: str) -> bool | None:
    """Whether the CPU multiplies matrices of a half type by itself; None where nothing tells."""
    import torch

    known: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # older torch has none
    found = [known[name] for name in _INSTRUCTIONS[dtype] if name in known]
    return any(found) if found else None


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device has no memory left."""
    # MPS has no class of its own for it; torch's is not imported for --help
    told = isinstance(error, RuntimeError) and "backend out of memory" in str(error)
    return told or type(error).__name__ == "OutOfMemoryError"


def _found(asked: str) -> torch.device:
    import torch

    # of several processes each has the accelerator of its number
    together, number = "LOCAL_RANK" in os.environ, int(os.environ.get("LOCAL_RANK", "0"))
    names, kind = [CPU], CPU
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        kind = accelerator.type
        names += [f"{kind}:{n}" for n in range(torch.accelerator.device_count())]
    if together and asked in names[1:]:
        raise HeadpruneError(
            f"--device {asked} is one device, and several processes were started, which take one "
            f"each: give --device {kind}."
        )
    # statistics are in float64, which MPS has not
    automatic = CPU if kind == "mps" else kind
    name = automatic if asked == AUTO else asked
    if name == kind and kind != CPU:
        name = f"{kind}:{number}"
    if name not in names:
        raise HeadpruneError(
            f"--device {asked}: there is no such device here; there are {', '.join(names)}."
        )
    return torch.device(name)
