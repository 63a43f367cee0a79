"""Temporary files; those of a run that was killed go when the next one makes its own."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from headprune.io.locks import lock

_PREFIX, _SUFFIX = "headprune-", ".spool"


def temporary_file() -> tuple[int, Path]:
    """Makes a temporary file, open for reading and writing, and locked until it is closed.

    Files of this kind that no process has open are removed first.

    Raises:
        OSError: If it cannot be made.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):  # another user's, or gone by now
            _remove_abandoned(left)
    while True:
        file, name = tempfile.mkstemp(_SUFFIX, _PREFIX)
        path = Path(name)
        if lock(file) is not False and path.exists():  # else another took it for abandoned
            return file, path
        os.close(file)


def _remove_abandoned(path: Path) -> None:
    if sys.platform == "win32":
        return
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if lock(file):
            path.unlink()
    finally:
        os.close(file)
