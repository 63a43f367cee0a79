"""Which folders and files headprune wrote, told by what is in them and not by their names.

Only these may be replaced. A folder is ours if it has one of our records, and holds nothing beside
what that record stands for; a file is ours if it has the fields, or the mark, of its kind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import escape
from pathlib import Path
from typing import Any

from headprune.errors import CheckpointError
from headprune.io.parsing import read_json, read_yaml
from headprune.io.writing import abandoned
from headprune.runtime import MANIFEST

EXPORTED = "export.json"
_ANYWHERE = (".DS_Store", "Thumbs.db", "desktop.ini")  # of file managers
_MARKED_BYTES = 4096  # a mark stands near the start of a file


@dataclass(frozen=True)
class FolderKind:
    """A folder that headprune writes.

    Attributes:
        record: The file that says what it is.
        fields: What this file holds, among other things.
        files: The other files, as patterns in which * spans folders as well.
        listed: Files that the content of the record names.
    """

    record: str
    fields: frozenset[str]
    files: tuple[str, ...] = ()
    listed: Callable[[dict[str, Any]], Iterable[str]] = lambda content: ()

    def content(self, folder: Path) -> dict[str, Any] | None:
        """The content of the record; None where the folder is none of this kind."""
        read = read_yaml if self.record.endswith(".yaml") else read_json
        return _content(folder / self.record, self.fields, read)


def _of_manifest(content: dict[str, Any]) -> Iterable[str]:
    return content["files"] if isinstance(content["files"], dict) else ()


_TRAINING = ("history.jsonl", "checkpoints/*")
_SCORES = ("scores.safetensors", "scores.json")
TRAININGS = (
    FolderKind("config.yaml", frozenset({"model", "data", "train_gates"}), _TRAINING),
    FolderKind("config.yaml", frozenset({"model", "teacher", "data", "heal"}), _TRAINING),
)
KINDS = (
    FolderKind(
        MANIFEST,
        frozenset({"source", "lineage", "shape", "proof", "files"}),
        ("README.md",),
        _of_manifest,
    ),
    FolderKind(
        "gates.json",
        frozenset({"headprune_version", "model", "unit", "modules", "kept_heads"}),
        ("gates.safetensors", "weights.safetensors", "config.yaml", *_TRAINING),
    ),
    FolderKind(
        "scores.json", frozenset({"versions", "model", "unit", "modules", "criteria"}), _SCORES
    ),
    FolderKind(
        "roles.json",
        frozenset({"versions", "model", "settings", "roles", "modules"}),
        ("roles.svg", "roles.png", "scores.svg", "scores.png"),
    ),
    *TRAININGS,
    FolderKind(
        EXPORTED,
        frozenset({"versions", "format", "model", "proof", "files"}),
        (),
        _of_manifest,
    ),
)


def is_one_piece(folder: Path) -> bool:
    """Whether a folder is a model, or what headprune wrote: nothing else belongs in it."""
    return (folder / "config.json").is_file() or bool(_parts(folder))


def part_of(folder: Path, file: Path) -> bool:
    """Whether a file is one of those that make up what headprune wrote in a folder."""
    if not (file.is_relative_to(folder) and file.exists()):
        return False
    inside = file.relative_to(folder).as_posix()
    return any(fnmatch(inside, pattern) for pattern in _parts(folder))


def foreign(folder: Path) -> str | None:
    """The first file in a folder that headprune did not write there; None if all are ours."""
    parts = _parts(folder)
    for file in _files(folder):
        inside = file.relative_to(folder).as_posix()
        known = file.name in _ANYWHERE or any(fnmatch(inside, pattern) for pattern in parts)
        if not (known or (parts and is_ours(file))):
            return inside
    return None


def _parts(folder: Path) -> list[str]:
    """Patterns of the files that the records in a folder stand for."""
    found: list[str] = []
    for kind in KINDS:
        content = kind.content(folder)
        if content is not None:
            listed = (escape(str(file)) for file in kind.listed(content))
            found += [kind.record, *kind.files, *listed]
    return found


def _files(folder: Path) -> Iterator[Path]:
    """All files and links but those of an output that a dead run was making, in order."""

    def unreadable(error: OSError) -> None:
        raise CheckpointError(f"'{folder}' cannot be read through: {error}.")

    for place, folders, files in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(name for name in folders if not abandoned(Path(place) / name))
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        yield from (Path(place) / name for name in sorted([*files, *links]))


@dataclass(frozen=True)
class FileKind:
    """A file that headprune writes; called with a file, it says whether that is one.

    Attributes:
        fields: What it holds, among other things, if it is JSON or YAML.
        marks: What stands near its start, if it is neither; one of these.
        read: Reads the former.
    """

    fields: frozenset[str] = frozenset()
    marks: tuple[bytes, ...] = ()
    read: Callable[[Path], Any] = read_json

    def __call__(self, file: Path) -> bool:
        """Whether headprune wrote a file; a link is none of ours."""
        if file.is_symlink() or not file.is_file():
            return False
        if not self.marks:
            return _content(file, self.fields, self.read) is not None
        try:
            with file.open("rb") as stream:
                start = stream.read(_MARKED_BYTES)
        except OSError:
            return False
        return any(mark in start for mark in self.marks)


PLAN = FileKind(frozenset({"unit", "attentions"}))
EVALUATION = FileKind(frozenset({"provenance", "model", "differences"}))
CHECK = FileKind(frozenset({"verdict", "limits", "judge_s"}))
BASELINE = FileKind(frozenset({"subject", "inputs_sha256", "structure", "samples"}))
JUNIT = FileKind(marks=(b'<testsuite name="headprune check"',))
REPORT = FileKind(marks=(b'<meta name="generator" content="headprune', b"<!-- headprune"))
FIGURE = FileKind(marks=(b"<dc:title>headprune</dc:title>", b"Software\0headprune"))
# what a user may have put into a folder of ours
_AMONG_OTHERS = (PLAN, EVALUATION, CHECK, BASELINE, JUNIT, REPORT, FIGURE)


def is_ours(file: Path) -> bool:
    """Whether a file is of any kind that headprune writes by itself."""
    return any(kind(file) for kind in _AMONG_OTHERS)


def _content(
    file: Path, fields: frozenset[str], read: Callable[[Path], Any]
) -> dict[str, Any] | None:
    """The content of a JSON or YAML file that has all of some fields."""
    try:
        content = read(file)
    except (CheckpointError, FileNotFoundError):
        return None
    return content if isinstance(content, dict) and fields <= content.keys() else None
