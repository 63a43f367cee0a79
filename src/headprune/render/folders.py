"""Parts of a report in folders: results, gates, scores, roles, reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headprune.errors import CheckpointError
from headprune.evaluation.report import Report
from headprune.io.ownership import CHECK, EVALUATION
from headprune.io.parsing import read_as, read_json, validated
from headprune.regression.check import CheckReport
from headprune.runtime import MANIFEST
from headprune.schemas import gates as gates_folder
from headprune.schemas.gates import TrainedGates, read_gates, read_metadata
from headprune.schemas.manifest import Manifest, read_manifest
from headprune.schemas.plan import Plan, read_plan
from headprune.schemas.roles import ROLES_FILE, RolesRecord
from headprune.schemas.scores import METADATA as SCORES
from headprune.schemas.scores import Scores, read_scores

DEPTH = 3


@dataclass(frozen=True)
class Result:
    """A model that headprune wrote."""

    path: Path
    manifest: Manifest
    plan: Plan


@dataclass
class Place:
    """The parts in one folder, by path."""

    path: Path
    results: dict[Path, Result] = field(default_factory=dict)
    gates: dict[Path, TrainedGates] = field(default_factory=dict)
    scores: dict[Path, Scores] = field(default_factory=dict)
    roles: dict[Path, RolesRecord] = field(default_factory=dict)
    evaluations: dict[Path, Report] = field(default_factory=dict)
    checks: dict[Path, CheckReport] = field(default_factory=dict)

    @property
    def tips(self) -> list[Result]:
        """Results without a successor here."""
        parents = {step.id for one in self.results.values() for step in one.manifest.lineage}
        return [one for one in self.results.values() if one.manifest.id not in parents]


def read_place(path: Path) -> Place:
    """Read a report, or all parts in a folder, three levels deep.

    Raises:
        CheckpointError: If nothing finished is there, or something is damaged.
    """
    place = Place(path)
    if path.is_file():
        _read_report(path, place)
    elif not path.is_dir():
        raise CheckpointError(f"There is no run at '{path}': give a folder that headprune wrote.")
    try:
        for folder in _folders(path, DEPTH) if path.is_dir() else ():
            _read_folder(folder, place)
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be read through: {error}.") from None
    if not any(part for name, part in vars(place).items() if name != "path"):
        raise CheckpointError(
            f"'{path}' holds nothing to report on: no result ({MANIFEST}), no gates (gates.json), "
            f"no scores ({SCORES}), no roles ({ROLES_FILE}), and no report of "
            "'headprune evaluate --output' or of 'headprune check'."
        )
    return place


def _folders(path: Path, depth: int) -> Iterator[Path]:
    yield path
    inside_part = any((path / name).is_file() for name in (MANIFEST, gates_folder.METADATA))
    if depth == 0 or inside_part:
        return
    for folder in sorted(path.iterdir()):
        if folder.is_dir() and not folder.name.startswith("."):
            yield from _folders(folder, depth - 1)


def _read_folder(folder: Path, place: Place) -> None:
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
        place.results[folder] = Result(folder, manifest, read_plan(folder / "plan.json", {}))
    elif (folder / gates_folder.METADATA).is_file():
        place.gates[folder] = read_gates(folder, read_metadata(folder).model)
    elif (folder / SCORES).is_file():
        place.scores[folder] = read_scores(folder)
    if (folder / ROLES_FILE).is_file():
        place.roles[folder] = read_as(RolesRecord, folder / ROLES_FILE)
    for file in sorted(folder.glob("*.json")):
        try:
            _read_report(file, place)
        except (OSError, CheckpointError):
            if file.name.startswith("report"):
                raise


def _read_report(file: Path, place: Place) -> None:
    content: Any = read_json(file)
    if isinstance(content, dict) and CHECK.fields <= content.keys():
        place.checks[file] = validated(CheckReport, content, file)
    elif isinstance(content, dict) and EVALUATION.fields <= content.keys():
        place.evaluations[file] = validated(Report, content, file)
