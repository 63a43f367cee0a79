"""Write files and folders whole or not at all, with one writer at a time.

Beside an output that is being written lies a hidden work folder:

    .NAME.partial/new/NAME           the new output, moved to its place when complete
    .NAME.partial/old                the earlier output, where folders cannot be exchanged
    .NAME.partial/headprune-at-work  locked by the process at work, until that ends

The next process that writes the same output clears the litter of a killed one.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from headprune.errors import CheckpointError

if TYPE_CHECKING:
    from filelock import BaseFileLock

_NEW, _OLD, _MARK = "new", "old", "headprune-at-work"
_LONGEST = 255  # bytes in a name
_held: set[Path] = set()  # outputs that this process writes


def is_there(path: str | Path) -> bool:
    """Return whether a file or folder exists; False for a name no file system takes."""
    with suppress(OSError, ValueError):
        return Path(path).exists()
    return False


def real(path: Path, through: bool = False) -> Path:
    """Return where a path leads.

    Args:
        path: The path.
        through: Follow a link at its end, too. Outputs take the place of such a link.

    Raises:
        CheckpointError: If the path holds a null character.
    """
    try:
        if through or path.name in ("", ".."):
            return Path(os.path.realpath(path))
        return Path(os.path.realpath(path.parent), path.name)
    except ValueError as error:
        raise CheckpointError(f"'{path}' is no path: {error}.") from None


def beside(path: Path, form: str) -> Path:
    """Return a sibling of a path, its name shortened if it is too long.

    Args:
        path: The file or folder.
        form: The name of the sibling, with ``{}`` for that of ``path``.
    """
    name = form.format(path.name)
    excess = len(os.fsencode(name)) - _LONGEST
    if excess > 0:
        digest = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]
        start = os.fsencode(path.name)[: -excess - len(digest) - 1].decode(errors="ignore")
        name = form.format(f"{start}-{digest}")
    return path.with_name(name)


def work_folder(place: Path) -> Path:
    """Return the hidden folder beside an output."""
    return beside(real(place), ".{}.partial")


def is_reserved(place: Path) -> bool:
    """Return whether this process has reserved an output."""
    return real(place) in _held


@contextmanager
def reserved(place: Path) -> Iterator[Path]:
    """Reserve an output, file or folder, for this process; free within an outer reservation.

    Afterwards only the output is left, after an error or Ctrl-C too.

    Args:
        place: The output.

    Yields:
        Where to make its new version; nothing is there yet.

    Raises:
        CheckpointError: If another process is writing it, or nothing can be written there.
    """
    place = real(place)
    work = work_folder(place)
    if place in _held:
        yield _emptied(work, place)
        return
    missing = [parent for parent in work.parents if not is_there(parent)]
    lock = _lock_of(work)
    try:
        try:
            _locked(lock, work, place)
            _held.add(place)
            new = _emptied(work, place)
        except OSError as error:
            raise write_error(place, error) from error
        yield new
    finally:
        try:
            _release(lock, work, place, missing)
        except KeyboardInterrupt:
            _release(lock, work, place, missing)
            raise


def _lock_of(work: Path) -> BaseFileLock:
    from filelock import FileLock  # late: it is slow to import, and --help needs none

    return FileLock(work / _MARK, timeout=0)


def _locked(lock: BaseFileLock, work: Path, place: Path) -> None:
    from filelock import Timeout

    work.mkdir(parents=True, exist_ok=True)
    if work.is_symlink() or (any(work.iterdir()) and not _is_work_folder(work)):
        raise CheckpointError(
            f"'{work}' lies where the output would be made, and headprune did not make it. Move it "
            "away, or choose another output."
        )
    with suppress(Timeout, FileNotFoundError):  # the latter as its last writer removes it
        lock.acquire()
        if (work / _MARK).exists():
            return
    raise CheckpointError(
        f"Another process is writing '{place}'. Wait for it, or choose another output."
    )


def _is_work_folder(work: Path) -> bool:
    named = re.fullmatch(r"\..+\.partial", work.name, re.DOTALL)
    with suppress(OSError):
        inside = [*work.iterdir()]
        links = any(path.is_symlink() for path in (work, *inside))
        names = {path.name for path in inside}
        return bool(named) and not links and {_MARK} <= names <= {_NEW, _OLD, _MARK}
    return False


def _emptied(work: Path, place: Path) -> Path:
    _restore(work, place)
    for name in (_NEW, _OLD):
        if (work / name).is_dir():
            shutil.rmtree(work / name)
    (work / _NEW).mkdir()
    return work / _NEW / place.name


def _restore(work: Path, place: Path) -> None:
    """Put an earlier output back after an interruption between the two moves of ``put``."""
    if (work / _OLD).is_dir() and not os.path.lexists(place):
        (work / _OLD).rename(place)


def _release(lock: BaseFileLock, work: Path, place: Path, missing: list[Path]) -> None:
    from filelock import Timeout

    with suppress(OSError, Timeout):
        if _is_work_folder(work):
            lock.acquire()  # held already, unless Ctrl-C came first
            _restore(work, place)
            for name in (_NEW, _OLD):
                shutil.rmtree(work / name, ignore_errors=True)
            (work / _MARK).unlink()  # last: the next writer makes its own
    _held.discard(place)
    lock.release(force=True)
    with suppress(OSError):  # it is another's
        work.rmdir()
    for folder in missing:
        with suppress(OSError):  # it holds the output
            folder.rmdir()


def abandoned(work: Path) -> bool:
    """Return whether a folder is a work folder in which no process is at work."""
    from filelock import Timeout

    with suppress(OSError, Timeout):
        if _is_work_folder(work):
            with _lock_of(work):
                return True
    return False


def put(new: Path, place: Path) -> None:
    """Move a complete folder to its reserved place, in exchange for an earlier one.

    Where the system cannot exchange two folders, a kill between two moves leaves the earlier one
    in the work folder; the next reservation puts it back.

    Raises:
        OSError: If it cannot be moved.
    """
    if os.path.lexists(place) and not _exchanged(new, place):
        place.rename(work_folder(place) / _OLD)
    if new.exists() and not os.path.lexists(place):
        new.rename(place)


def _exchanged(one: Path, two: Path) -> bool:
    """Exchange two folders in one step; return False where the system cannot."""
    if sys.platform not in ("linux", "darwin"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    a, b, swap = os.fsencode(one), os.fsencode(two), ctypes.c_uint(2)
    with suppress(AttributeError):  # an old C library
        if sys.platform == "darwin":
            return bool(libc.renamex_np(a, b, swap) == 0)
        here = ctypes.c_int(-100)
        return bool(libc.renameat2(here, a, here, b, swap) == 0)
    return False


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, text as UTF-8, by way of a temporary one; it takes the place of a link.

    Raises:
        CheckpointError: If writing fails, or another process is at it.
    """
    path = real(path)
    # a lone surrogate, as in a file name, is no UTF-8
    text = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    try:
        with reserved(path) as new:
            new.write_bytes(text)
            new.replace(path)
    except OSError as error:
        raise write_error(path, error) from error


def refuse_link(place: Path) -> None:
    """Refuse to write through a link.

    Raises:
        CheckpointError: If the place is one.
    """
    if place.is_symlink():
        raise CheckpointError(
            f"'{place}' is a link to '{place.readlink()}', and nothing is written through links. "
            "Give the place itself, or remove the link."
        )


def of_full_disk(error: Exception) -> bool:
    """Return whether an error of Python or Rust says that no space is left."""
    return getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in str(error).lower()


def write_error(path: Path, error: Exception) -> CheckpointError:
    """Return the sentence for a failed write."""
    strerror = getattr(error, "strerror", None)
    why = "the disk is full" if of_full_disk(error) else strerror or str(error)
    return CheckpointError(
        f"Could not write '{path}': {why}. Nothing was left there; free some space or choose "
        "another place."
    )


def refuse_strange_name(path: str | Path) -> None:
    """Refuse a path that is no UTF-8, which safetensors cannot open.

    Raises:
        CheckpointError: If it is none.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"The path '{path}' is no UTF-8, and safetensors opens no such files. Rename it."
        ) from None
