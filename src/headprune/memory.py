"""How much memory a process may still take."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available() -> int | None:
    """Bytes that are free, within the limit of a container; None where the system does not say."""
    found: list[int] = []
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(line for line in lines if line.startswith("MemAvailable:"))
        found.append(1024 * int(free.split()[1]))
    with suppress(OSError, ValueError):  # the limit may be "max"
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        # pages of files that were read are let go when others need the room
        found.append(max(0, limit - used + int(stat.get("inactive_file", 0))))
    return min(found, default=None)
