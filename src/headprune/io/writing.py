"""Writing files and folders whole or not at all, and one writer at a time.

Beside every output that is being written lies a hidden folder, its work folder:

.NAME.partial/new/NAME   what is to be the output; moved into its place when it is complete
.NAME.partial/old        the output that was there before, where the system cannot exchange the two

The process at work holds a lock on that folder, which ends with the process, however it ends. So
the next one that writes the same output finds what a dead one left there, and takes it over. Only
a folder with the file of the name ``headprune-at-work`` is one of these.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from headprune.errors import CheckpointError
from headprune.io.locks import lock

_NEW, _OLD, _MARK = "new", "old", "headprune-at-work"
_LONGEST = 255  # bytes in a name
_held: dict[Path, Path] = {}  # outputs that this process writes, and their work folders


def is_there(path: str | Path) -> bool:
    """Whether there is a file or folder; False for what no file system takes as a name."""
    with suppress(OSError, ValueError):  # of Path.exists, where a name is too long or forbidden
        return Path(path).exists()
    return False


def real(path: Path) -> Path:
    """Where a path leads: an output that is a link is written where the link points.

    Raises:
        CheckpointError: If it is no path at all.
    """
    try:
        return Path(os.path.realpath(path))
    except ValueError as error:  # a null character
        raise CheckpointError(f"'{path}' is no path: {error}.") from None


def beside(path: Path, form: str) -> Path:
    """A sibling of ``path``, its name made of that of ``path``, and shortened if it is too long.

    Args:
        path: The file or folder.
        form: The name, with ``{}`` for that of ``path``.
    """
    name = form.format(path.name)
    excess = len(os.fsencode(name)) - _LONGEST
    if excess > 0:
        digest = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]
        start = os.fsencode(path.name)[: -excess - len(digest) - 1].decode(errors="ignore")
        name = form.format(f"{start}-{digest}")
    return path.with_name(name)


def work_folder(place: Path) -> Path:
    """The hidden folder beside an output in which it is made."""
    return beside(real(place), ".{}.partial")


def is_reserved(place: Path) -> bool:
    """Whether this process has reserved an output."""
    return real(place) in _held


@contextmanager
def reserved(place: Path) -> Iterator[Path]:
    """Reserves an output, file or folder, for this process; within it once more at no cost.

    What a dead process left of it is finished if it was complete, and else removed. When the block
    ends, in whatever way, nothing but the output is left. Where the system or the file system has
    no locks (Windows, some network file systems), two writers are not kept apart.

    Args:
        place: The output.

    Yields:
        Where its new version is to be made, of its name; nothing is there yet.

    Raises:
        CheckpointError: If another process is writing it, or nothing can be written there.
    """
    place = real(place)
    if place in _held:
        yield _fresh(_held[place], place)
        return
    work = work_folder(place)
    missing = [parent for parent in work.parents if not is_there(parent)]
    held = None
    try:
        try:
            with _interrupts_wait():
                held = _locked(work, place)
                adopt(work / _NEW / place.name, place, work / _OLD)
                _held[place] = work
                new = _fresh(work, place)
        except OSError as error:
            raise write_error(place, error) from error
        yield new
    finally:

        def release() -> None:
            nonlocal held
            with _interrupts_wait():
                # an earlier output that could not be put back waits there for the next run
                waits = (work / _OLD).is_dir() and not os.path.lexists(place)
                if _held.pop(place, None) and not waits:
                    _remove(work)
                for folder in missing:
                    with suppress(OSError):  # it holds the output
                        folder.rmdir()
                if held is not None:
                    os.close(held)
                    held = None

        try:
            release()
        except KeyboardInterrupt:  # it may have come before interrupts waited
            release()
            raise


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C takes effect when the block has ended, so that it is never half done."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield  # Ctrl-C raises nothing here
        return
    waiting: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: waiting.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting:
            before(signal.SIGINT, waiting[0])


def _fresh(work: Path, place: Path) -> Path:
    """Empties a work folder."""
    for name in (_NEW, _OLD):
        if (work / name).is_dir():
            shutil.rmtree(work / name)
    (work / _NEW).mkdir()
    return work / _NEW / place.name


def _remove(work: Path) -> None:
    for name in (_NEW, _OLD):
        shutil.rmtree(work / name, ignore_errors=True)
    with suppress(OSError):
        if {inside.name for inside in work.iterdir()} <= {_MARK}:  # it says whose the rest is
            (work / _MARK).unlink(missing_ok=True)
            work.rmdir()


def _locked(work: Path, place: Path) -> int | None:
    """Makes the work folder and locks it; the lock lasts until it is closed."""
    while True:
        work.mkdir(parents=True, exist_ok=True)
        if sys.platform == "win32":
            _mark(work)
            return None
        try:
            folder = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue  # its last writer has just removed it
        if lock(folder) is False:
            os.close(folder)
            raise CheckpointError(
                f"Another process is writing '{place}'. Wait for it, or choose another output."
            )
        try:
            if os.path.samestat(os.fstat(folder), work.stat()):
                _mark(work)
                return folder
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(folder)
            raise
        os.close(folder)


def _mark(work: Path) -> None:
    """Marks an empty folder as a work folder.

    Raises:
        CheckpointError: If it holds something, and has no mark.
    """
    if not (work / _MARK).is_file() and any(work.iterdir()):
        raise CheckpointError(
            f"'{work}' lies where the output would be made, and headprune did not make it. Move it "
            "away, or choose another output."
        )
    (work / _MARK).touch()


def abandoned(work: Path) -> bool:
    """Whether a folder is a work folder in which no process is at work."""
    named = re.fullmatch(r"\..+\.partial", work.name) and not work.is_symlink()
    if sys.platform == "win32" or not named or not (work / _MARK).is_file():
        return False
    try:
        if {inside.name for inside in work.iterdir()} - {_NEW, _OLD, _MARK}:
            return False
        folder = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return bool(lock(folder))
    finally:
        os.close(folder)


def put(new: Path, place: Path, old: Path) -> None:
    """Moves a complete folder to its place; an earlier one there is removed, at no moment both.

    Where the system cannot exchange two folders, the earlier one goes to ``old`` first; ``adopt``
    finishes that if the process dies in between.

    Args:
        new: The folder.
        place: Where it belongs.
        old: Where the earlier one waits.

    Raises:
        OSError: If it cannot be moved; what was there is there.
    """
    if not os.path.lexists(place):
        new.rename(place)
    elif _exchanged(new, place):
        shutil.rmtree(new, ignore_errors=True)
    else:
        place.rename(old)
        try:
            new.rename(place)
        except OSError:
            old.rename(place)
            raise
        shutil.rmtree(old, ignore_errors=True)


def adopt(new: Path, place: Path, old: Path) -> None:
    """Finishes a ``put`` that was cut short between its two moves."""
    if old.is_dir() and not os.path.lexists(place):
        (new if new.is_dir() else old).rename(place)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchanges two folders in one step; False where that is not possible, and nothing is done."""
    if sys.platform not in ("linux", "darwin"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(one), os.fsencode(other)
    try:
        if sys.platform == "darwin":
            return bool(libc.renamex_np(*paths, ctypes.c_uint(2)) == 0)  # RENAME_SWAP
        here = ctypes.c_int(-100)  # AT_FDCWD
        flag = ctypes.c_uint(2)  # RENAME_EXCHANGE
        return bool(libc.renameat2(here, paths[0], here, paths[1], flag) == 0)
    except AttributeError:  # an old C library
        return False


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file, text as UTF-8, by way of a temporary one.

    Raises:
        CheckpointError: If writing fails, or another process is at it.
    """
    path = real(path)
    # a lone surrogate, as a file name may hold, is no UTF-8; what JSON would write is readable
    text = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    try:
        with reserved(path) as new:
            new.write_bytes(text)
            new.replace(path)
    except OSError as error:
        raise write_error(path, error) from error


def of_full_disk(error: Exception) -> bool:
    """Whether an error says that there is no space left, in Python's words or those of Rust."""
    return getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in str(error).lower()


def write_error(path: Path, error: Exception) -> CheckpointError:
    """Says in one sentence why writing failed."""
    strerror = getattr(error, "strerror", None)
    why = "the disk is full" if of_full_disk(error) else strerror or str(error)
    return CheckpointError(
        f"Could not write '{path}': {why}. Nothing was left there; free some space or choose "
        "another place."
    )


def refuse_strange_name(path: str | Path) -> None:
    """Refuses a folder whose path is no UTF-8, which safetensors cannot open.

    Raises:
        CheckpointError: If it is such a one.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"The path '{path}' is no UTF-8, and safetensors opens no such files. Rename it."
        ) from None


def write_yaml(content: dict[str, Any], path: Path) -> None:
    """Writes YAML, whole or not at all."""
    write_whole(path, yaml.safe_dump(content, sort_keys=False))
