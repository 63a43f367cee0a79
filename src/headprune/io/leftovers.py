"""headprune clean: what runs that died left behind."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from headprune.errors import CheckpointError
from headprune.io.ownership import SWEEP, is_training
from headprune.io.writing import abandoned, adopt, is_work_folder, write_error

# of older versions: a new output that was being made, and the one before it
_BY_PROCESS = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)\.(?P<what>partial|old)")
_OF_A_SWEEP = re.compile(r"tmp[a-z0-9_]{8}")
_BROKEN_CHECKPOINT = re.compile(r"incomplete-checkpoint-\d+")


@dataclass(frozen=True)
class Leftover:
    """A file or folder that nobody will come back to.

    Attributes:
        path: Where it lies.
        bytes: How large it is.
        what: What it is, in words.
    """

    path: Path
    bytes: int
    what: str


@dataclass(frozen=True)
class Cleaned:
    """What was found below a folder.

    Attributes:
        leftovers: What dead runs left.
        resumable: Folders of interrupted trainings, which ``--resume`` goes on from.
        removed: Whether the leftovers are gone.
    """

    leftovers: tuple[Leftover, ...]
    resumable: tuple[Path, ...]
    removed: bool

    @property
    def bytes(self) -> int:
        """Size of all leftovers."""
        return sum(leftover.bytes for leftover in self.leftovers)

    def lines(self) -> tuple[str, ...]:
        """What was found, for people."""
        left = [f"{decimal(one.bytes):>10}  {one.path}  ({one.what})" for one in self.leftovers]
        total = f"{decimal(self.bytes):>10}  in all" if left else "No run left anything."
        kept = [
            f"kept: {path}, an interrupted training that --resume goes on from"
            for path in self.resumable
        ]
        return (*left, total, *kept)

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "schema_version": 1,
            "leftovers": [
                {**asdict(leftover), "path": str(leftover.path)} for leftover in self.leftovers
            ],
            "bytes": self.bytes,
            "resumable": [str(path) for path in self.resumable],
            "removed": self.removed,
        }


def survey(folder: Path) -> Cleaned:
    """Finds what dead runs left below a folder, and touches nothing.

    Raises:
        CheckpointError: If there is no such folder, or it cannot be read through.
    """
    if not folder.is_dir():
        raise CheckpointError(f"There is no folder '{folder}'.")
    leftovers, resumable = [], []
    try:
        for path in _below(folder):
            what = _what(path)
            if what is not None:
                leftovers.append(Leftover(path, _size(path), what))
            elif path.is_dir() and is_training(path):
                resumable.append(path)
    except OSError as error:
        raise CheckpointError(f"'{folder}' cannot be read through: {error}.") from None
    return Cleaned(tuple(leftovers), tuple(resumable), removed=False)


def clean(found: Cleaned) -> Cleaned:
    """Removes what ``survey`` found; an output that a run died over is put in its place first.

    Raises:
        CheckpointError: If something cannot be removed.
    """
    gone = []
    for leftover in found.leftovers:
        path = leftover.path
        try:
            if _what(path) is not None and _removed(path):
                gone.append(leftover)  # else a run has taken it up since
        except OSError as error:
            raise write_error(path, error) from error
    return Cleaned(tuple(gone), found.resumable, removed=True)


def _removed(path: Path) -> bool:
    if is_work_folder(path):
        return abandoned(path, remove=True)
    by_process = _BY_PROCESS.fullmatch(path.name)
    if by_process is not None and path.is_dir():
        name, pid = by_process["name"], by_process["pid"]
        new, old = (path.with_name(f".{name}.{pid}.{what}") for what in ("partial", "old"))
        adopt(new, path.with_name(name), old)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return True


def _what(path: Path) -> str | None:
    """What a dead run left there, in words; None if it is none of that, or still in use."""
    if path.is_symlink():
        return None
    by_process = _BY_PROCESS.fullmatch(path.name)
    if by_process is not None and _lives(int(by_process["pid"])):
        return None
    if is_work_folder(path):
        return "an unfinished output" if abandoned(path) else None
    if by_process is not None:
        before = by_process["what"] == "old"
        return "an output that was replaced" if before else "an unfinished output"
    if _BROKEN_CHECKPOINT.fullmatch(path.name) and path.is_dir():
        return "a checkpoint that was not completed"
    if _OF_A_SWEEP.fullmatch(path.name) and path.is_dir() and SWEEP.content(path.parent):
        return "a cut of a sweep"
    return None


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return True


def _below(folder: Path) -> Iterator[Path]:
    """Everything below a folder, in order, but for what lies in a leftover; no link is followed."""

    def unreadable(error: OSError) -> None:
        raise CheckpointError(f"'{error.filename}' cannot be read: {error.strerror}.")

    for place, folders, files in os.walk(folder, onerror=unreadable):
        folders.sort()
        yield from (Path(place) / name for name in sorted([*folders, *files]))
        folders[:] = [name for name in folders if _what(Path(place) / name) is None]


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(
        (Path(place) / name).lstat().st_size for place, _, files in os.walk(path) for name in files
    )
