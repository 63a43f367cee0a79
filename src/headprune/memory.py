"""Memory that a process may still take, of the host and of a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")  # limit, use, and its reclaimable part


def available() -> int | None:
    """Return the free bytes, within the limits of control groups; None if unknown."""
    free_bytes: list[int] = []
    with suppress(OSError):
        lines = (_PROC / "meminfo").read_text(encoding="ascii").splitlines()
        free = next(line for line in lines if line.startswith("MemAvailable:"))
        free_bytes.append(1024 * int(free.split()[1]))
    for group, (limited, taken, unused) in _groups():
        with suppress(OSError, ValueError):  # the limit may be "max"
            limit, used = (int((group / name).read_text()) for name in (limited, taken))
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            # the system reclaims pages of files
            free_bytes.append(max(0, limit - used + int(stat.get(unused, 0))))
    return min(free_bytes, default=None)


def _groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the control group of this process and all above it.

    In a container, paths may be those of the host, and the top folder is the container's.
    """
    lines: list[str] = []
    with suppress(OSError):
        lines = (_PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, names = (_CGROUP / "memory", _V1) if controllers else (_CGROUP, _V2)
        group = top / path.lstrip("/")
        yield from (
            (place, names) for place in (group, *group.parents) if place.is_relative_to(top)
        )


def on_device(device: torch.device) -> int | None:
    """Return the free bytes of a device with memory of its own; None of others."""
    if device.type != "cuda":
        return None
    import torch

    return int(torch.cuda.mem_get_info(device)[0])
