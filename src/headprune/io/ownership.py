"""Recognise folders and files that headprune wrote, by their content: only these are replaced.

A folder is ours if it has one of our records, and holds nothing but the record's files. A file is
ours if it has the fields, or the mark, of its kind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
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
        record: The JSON or YAML file that says so.
        fields: Some of its fields; files named under "files" belong to the folder.
        files: Patterns of other files; * spans folders.
    """

    record: str
    fields: frozenset[str]
    files: tuple[str, ...] = ()


_TRAINING = ("history.jsonl", "checkpoints/*")
KINDS = (
    FolderKind(
        MANIFEST, frozenset({"source", "lineage", "shape", "proof", "files"}), ("README.md",)
    ),
    FolderKind(
        "gates.json",
        frozenset({"headprune_version", "model", "unit", "modules", "kept_heads"}),
        ("gates.safetensors", "weights.safetensors", "config.yaml", *_TRAINING),
    ),
    FolderKind(
        "scores.json",
        frozenset({"versions", "model", "unit", "modules", "criteria"}),
        ("scores.safetensors",),
    ),
    FolderKind(
        "roles.json",
        frozenset({"versions", "model", "settings", "roles", "modules"}),
        ("roles.svg", "roles.png", "scores.svg", "scores.png"),
    ),
    FolderKind("config.yaml", frozenset({"model", "data", "train_gates"}), _TRAINING),
    FolderKind("config.yaml", frozenset({"model", "teacher", "data", "heal"}), _TRAINING),
    FolderKind(EXPORTED, frozenset({"versions", "format", "model", "proof", "files"})),
)


@dataclass(frozen=True)
class FileKind:
    """A file that headprune writes by itself; called with a file, return whether it is one.

    Attributes:
        fields: Some fields of a JSON file.
        marks: One of these stands near the start of another file.
    """

    fields: frozenset[str] = frozenset()
    marks: tuple[bytes, ...] = ()

    def __call__(self, file: Path) -> bool:
        """Return whether headprune wrote a file; never a link."""
        if file.is_symlink() or not file.is_file():
            return False
        if not self.marks:
            return _content(file, self.fields) is not None
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
REPORT = FileKind(marks=(b'<meta name="generator" content="headprune',))
FIGURE = FileKind(marks=(b"<dc:title>headprune</dc:title>", b"Software\0headprune"))
_AMONG_OTHERS = (PLAN, EVALUATION, CHECK, BASELINE, JUNIT, REPORT, FIGURE)


def is_one_piece(folder: Path) -> bool:
    """Return whether a folder is a model or was written by headprune."""
    return (folder / "config.json").is_file() or bool(_parts(folder))


def part_of(folder: Path, file: Path) -> bool:
    """Return whether a file belongs to what headprune wrote in a folder."""
    return file.is_relative_to(folder) and file.exists() and _matches(folder, file, _parts(folder))


def foreign(folder: Path) -> str | None:
    """Return the first file in a folder that headprune did not write there; None without one."""
    parts = _parts(folder)
    for file in _files(folder):
        known = file.name in _ANYWHERE or _matches(folder, file, parts)
        if not (known or (parts and any(kind(file) for kind in _AMONG_OTHERS))):
            return file.relative_to(folder).as_posix()
    return None


def _matches(folder: Path, file: Path, patterns: list[str]) -> bool:
    return any(fnmatch(file.relative_to(folder).as_posix(), pattern) for pattern in patterns)


def _parts(folder: Path) -> list[str]:
    """Return patterns of the files of the records in a folder."""
    patterns: list[str] = []
    for kind in KINDS:
        content = _content(folder / kind.record, kind.fields)
        if content is not None:
            listed = content.get("files") if "files" in kind.fields else None
            names = listed if isinstance(listed, dict) else ()
            patterns += [kind.record, *kind.files, *(escape(str(name)) for name in names)]
    return patterns


def _files(folder: Path) -> Iterator[Path]:
    """Return all files and links in order, without leftovers of a killed run."""

    def unreadable(error: OSError) -> None:
        raise CheckpointError(f"'{folder}' cannot be read through: {error}.")

    for place, folders, files in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(name for name in folders if not abandoned(Path(place) / name))
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        yield from (Path(place) / name for name in sorted([*files, *links]))


def _content(file: Path, fields: frozenset[str]) -> dict[str, Any] | None:
    """Return the content of a JSON or YAML file with these fields; None without them."""
    try:
        content = read_yaml(file) if file.suffix == ".yaml" else read_json(file)
    except (CheckpointError, FileNotFoundError):
        return None
    return content if isinstance(content, dict) and fields <= content.keys() else None
