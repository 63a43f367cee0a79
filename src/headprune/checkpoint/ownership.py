"""Which folders and files headprune wrote, told by what is in them and not by their names.

Only these may be replaced. A folder is ours if it has one of our records, and holds nothing beside
what that record stands for; a file is ours if it has the fields, or the mark, of its kind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from headprune.errors import CheckpointError
from headprune.parsing import read_json, read_yaml
from headprune.runtime import MANIFEST

IMPORTED = "import.json"
GENERATOR = "headprune"  # how the files name their maker
_ANYWHERE = (".DS_Store", "Thumbs.db", "desktop.ini", ".gitattributes")  # of file managers and hubs
# what a dead run of this or an older version left, and a download from the hub
_LEFTOVERS = ("*.partial/new/*", "*.partial/old/*", "*.partial", ".cache/huggingface/*")
_MARKED_BYTES = 4096  # a mark stands near the start of a file


@dataclass(frozen=True)
class Kind:
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


def _of_manifest(content: dict[str, Any]) -> Iterable[str]:
    return content["files"] if isinstance(content["files"], dict) else ()


def _of_import(content: dict[str, Any]) -> Iterable[str]:
    return content["files"] if isinstance(content["files"], list) else ()


def _of_run(content: dict[str, Any]) -> Iterator[str]:
    steps = content["steps"] if isinstance(content["steps"], dict) else {}
    for name, step in steps.items():
        files = step.get("files") if isinstance(step, dict) else None
        yield from (f"{name}/{file}" for file in files or ())


_TRAINING = ("history.jsonl", "checkpoints/*")
_SCORES = ("scores.safetensors", "scores.json")
KINDS = {
    "result": Kind(
        MANIFEST,
        frozenset({"source", "lineage", "shape", "proof", "files"}),
        ("README.md",),
        _of_manifest,
    ),
    "gates": Kind(
        "gates.json",
        frozenset({"headprune_version", "model", "unit", "modules", "kept_heads"}),
        ("gates.safetensors", "weights.safetensors", "config.yaml", *_TRAINING),
    ),
    "scores": Kind(
        "scores.json", frozenset({"versions", "model", "unit", "modules", "criteria"}), _SCORES
    ),
    "sweep": Kind(
        "config.yaml",
        frozenset({"model", "fingerprint", "data", "test", "calibration", "evaluation"}),
        ("sweep.json", "points/*.json", "curve.svg", "curve.png", "scores/scores.*"),
    ),
    "training of gates": Kind(
        "config.yaml", frozenset({"model", "data", "train_gates"}), _TRAINING
    ),
    "healing": Kind("config.yaml", frozenset({"model", "teacher", "data", "heal"}), _TRAINING),
    "run": Kind(
        "run.json",
        frozenset({"name", "versions", "steps"}),
        ("recipe.yaml", "requirements.lock", ".lock", ".partial/*"),
        _of_run,
    ),
    "imported weights": Kind(IMPORTED, frozenset({"headprune_version", "files"}), (), _of_import),
}


def kind_of(folder: Path) -> str | None:
    """What headprune wrote in a folder; None where it is none of ours."""
    return next((name for name, kind in KINDS.items() if _record(folder, kind) is not None), None)


def foreign(folder: Path) -> str | None:
    """The first file in a folder that headprune did not write there; None if all are ours."""
    patterns: list[str] = []
    named: set[str] = set()
    for kind in KINDS.values():
        content = _record(folder, kind)
        if content is not None:
            patterns += [kind.record, *kind.files]
            named |= {str(file) for file in kind.listed(content)}
    for file in _files(folder):
        inside = file.relative_to(folder).as_posix()
        litter = file.name in _ANYWHERE or any(fnmatch(inside, one) for one in _LEFTOVERS)
        known = inside in named or any(fnmatch(inside, pattern) for pattern in patterns)
        if not (litter or known or (patterns and is_ours(file))):
            return inside
    return None


def _record(folder: Path, kind: Kind) -> dict[str, Any] | None:
    return _content(folder / kind.record, kind.fields)


def _files(folder: Path) -> Iterator[Path]:
    """Everything but folders, in order; links are not followed."""

    def unreadable(error: OSError) -> None:
        raise CheckpointError(f"'{folder}' cannot be read through: {error}.")

    for place, folders, files in os.walk(folder, onerror=unreadable):
        folders.sort()
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        yield from (Path(place) / name for name in sorted([*files, *links]))


@dataclass(frozen=True)
class FileKind:
    """A file that headprune writes.

    Attributes:
        fields: Sets of fields; it is JSON, or YAML, that has all of one of them.
        mark: What stands near its start, if it is neither.
    """

    fields: tuple[frozenset[str], ...] = ()
    mark: bytes = b""


PLAN = FileKind((frozenset({"unit", "attentions"}),))
EVALUATION = FileKind((frozenset({"provenance", "model", "differences"}),))
CHECK = FileKind((frozenset({"provenance", "model", "verdict", "limits"}),))
BASELINE = FileKind((frozenset({"subject", "inputs_sha256", "structure", "samples"}),))
RECIPE = FileKind((frozenset({"model", "output", "steps"}),))
JUNIT = FileKind(mark=b'<testsuite name="headprune check"')
PAGE = FileKind(mark=b'<meta name="generator" content="headprune')
SUMMARY = FileKind(mark=b"<!-- headprune")
FIGURE = FileKind(mark=b"headprune")
FILE_KINDS = (PLAN, EVALUATION, CHECK, BASELINE, JUNIT, PAGE, SUMMARY)


def is_ours(file: Path, *kinds: FileKind) -> bool:
    """Whether headprune wrote a file.

    Args:
        file: The file; a link is none of ours.
        *kinds: What it must be; none for any of those that a user may have put among others.
    """
    if file.is_symlink() or not file.is_file():
        return False
    return any(_is(file, kind) for kind in kinds or FILE_KINDS)


def _is(file: Path, kind: FileKind) -> bool:
    if kind.mark:
        try:
            with file.open("rb") as stream:
                return kind.mark in stream.read(_MARKED_BYTES)
        except OSError:
            return False
    return any(_content(file, fields) is not None for fields in kind.fields)


def _content(file: Path, fields: frozenset[str]) -> dict[str, Any] | None:
    """The content of a JSON or YAML file that has all of some fields."""
    if not file.is_file() or file.suffix not in (".json", ".yaml", ".yml"):
        return None
    try:
        content = read_json(file) if file.suffix == ".json" else read_yaml(file, loader=_LOADER)
    except (CheckpointError, FileNotFoundError):
        return None
    return content if isinstance(content, dict) and fields <= content.keys() else None


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
