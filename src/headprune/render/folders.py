"""Parts of a report in folders: results, gates, scores, roles, reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from headprune.errors import CheckpointError
from headprune.evaluation.report import Report
from headprune.io.ownership import CHECK, EVALUATION
from headprune.io.parsing import first_problem, read_as, read_json, read_json_lines, validated
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
POINTS = 250  # of a drawn history; a line has no room for more


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


class _Step(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # a report does not show all of it

    step: Annotated[int, Field(ge=0, le=2**53)]  # which a browser's numbers reach to
    loss: float
    expected_heads: float | None = None
    target_heads: float | None = None
    settled: bool = False


_STEPS = TypeAdapter(tuple[_Step, ...])


@dataclass(frozen=True)
class History:
    """A training, thinned to the points of a drawing."""

    kind: str  # "gates", or "heal" for a result
    points: tuple[_Step, ...]  # the last step of every bucket, with the mean loss of its steps
    phases: tuple[tuple[float, str], ...]  # where something began, and what
    steps: int  # in the file

    def column(self, name: str) -> list[float]:
        """Return a number of every point; empty where one lacks it."""
        values = [getattr(point, name) for point in self.points]
        return [] if None in values else values


def history(path: Path, kind: str) -> History | None:
    """Return a history; None where empty. Raise CheckpointError where damaged."""
    try:
        steps = _STEPS.validate_python(read_json_lines(path))
    except ValidationError as problem:
        why = first_problem(problem)
        raise CheckpointError(f"The history '{path}' is damaged: {why}.") from None
    if not steps:
        return None
    width = -(-len(steps) // POINTS)
    buckets = [steps[at : at + width] for at in range(0, len(steps), width)]
    points = [b[-1].model_copy(update={"loss": fmean(s.loss for s in b)}) for b in buckets]
    phases = [(float(b.step), "heads chosen") for a, b in pairwise(steps) if b.settled > a.settled]
    return History(kind, tuple(points), tuple(phases), len(steps))
