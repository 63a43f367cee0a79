"""Temporary files; those of a run that was killed go when the next one makes its own."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from headprune.io.writing import perhaps_without_locks

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
        if _locks(file) and path.exists():  # else another process took it for abandoned
            return file, path
        os.close(file)


def _remove_abandoned(path: Path) -> None:
    if sys.platform == "win32":
        return
    import fcntl

    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(file)


def _locks(file: int) -> bool:
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        with perhaps_without_locks():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
