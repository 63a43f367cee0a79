"""How much memory a process may still take, of the host and of a device."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (  # of version 2 and of version 1: the folder, limit, use, and what of it can be let go
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available() -> int | None:
    """Bytes that are free, within the limit of a container; None where the system does not say."""
    found: list[int] = []
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(line for line in lines if line.startswith("MemAvailable:"))
        found.append(1024 * int(free.split()[1]))
    for folder, limited, taken, unused in _LIMITS:
        with suppress(OSError, ValueError):  # the limit may be "max"
            place = _CGROUP / folder
            limit, used = (int((place / name).read_text()) for name in (limited, taken))
            stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
            # pages of files that were read are let go when others need the room
            found.append(max(0, limit - used + int(stat.get(unused, 0))))
    return min(found, default=None)


def on_device(device: torch.device) -> int | None:
    """Bytes that are free on a device with memory of its own; None on others."""
    if device.type != "cuda":
        return None
    import torch

    return int(torch.cuda.mem_get_info(device)[0])
