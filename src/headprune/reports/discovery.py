"""What lies in the folders that a report is asked for, found by content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from headprune.errors import CheckpointError
from headprune.io.ownership import CHECK, EVALUATION
from headprune.io.parsing import read_as, read_json, read_yaml, validated
from headprune.resuming import unfinished
from headprune.runtime import MANIFEST
from headprune.schemas import gates as gates_folder
from headprune.schemas.gates import TrainedGates, read_gates, read_metadata
from headprune.schemas.manifest import Manifest, read_manifest
from headprune.schemas.plan import Plan, read_plan
from headprune.schemas.roles import ROLES_FILE, RolesRecord
from headprune.schemas.scores import METADATA as SCORES
from headprune.schemas.scores import Scores, read_scores

DEPTH = 3
_LARGEST_JSON = 50_000_000  # bytes; a report of evaluate is far smaller


@dataclass(frozen=True)
class GatesFolder:
    """Finished gates."""

    path: Path
    trained: TrainedGates

    @cached_property
    def settings(self) -> Trained:
        """The settings of the training, as its config.yaml has them."""
        path = self.path / "config.yaml"
        section = settings_in(path).get("train_gates")
        return validated(Trained, {} if section is None else section, path)


@dataclass(frozen=True)
class ResultFolder:
    """A model that headprune wrote."""

    path: Path
    manifest: Manifest
    plan: Plan


@dataclass(frozen=True)
class ScoresFolder:
    """Scores of units, by criterion."""

    path: Path
    scored: Scores


class Trained(BaseModel):
    """What a training of gates was asked for, as far as it is told in words.

    Attributes:
        target_heads: A share or a count of heads.
        l0_penalty: The penalty of every open head instead.
        attention: Kinds of attention.
    """

    model_config = ConfigDict(frozen=True, extra="allow")  # all of them are shown, as they are

    schema_version: Literal[1] = 1
    target_heads: int | float | None = None
    l0_penalty: float | None = None
    attention: list[str] = []


def settings_in(path: Path) -> dict[str, Any]:
    """The settings in a file; none where it is missing.

    Raises:
        CheckpointError: If it is damaged.
    """
    try:
        content = read_yaml(path)
    except FileNotFoundError:
        return {}
    if not isinstance(content, dict):
        raise CheckpointError(f"'{path}' is damaged: it holds no settings.")
    return {str(name): value for name, value in content.items()}


@dataclass
class Found:
    """The parts in one place; of what is unfinished or out of place there, a sentence each."""

    place: Path
    results: list[ResultFolder] = field(default_factory=list)
    gates: list[GatesFolder] = field(default_factory=list)
    scores: list[ScoresFolder] = field(default_factory=list)
    reports: dict[Path, dict[str, Any]] = field(default_factory=dict)
    roles: dict[Path, RolesRecord] = field(default_factory=dict)
    checks: dict[Path, dict[str, Any]] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)

    @property
    def tips(self) -> list[ResultFolder]:
        """The results that no other result here was made of."""
        made_from = {step.id for result in self.results for step in result.manifest.lineage}
        return [result for result in self.results if result.manifest.id not in made_from]


def discover(place: Path) -> Found:
    """Finds results, gates, scores, roles and evaluations in a folder, some levels deep.

    Args:
        place: A folder, or a report that ``evaluate`` or ``check`` wrote.

    Raises:
        CheckpointError: If nothing finished is there, or something is damaged.
    """
    found = Found(place)
    if place.is_file():
        if not _add_report(place, found):
            raise CheckpointError(
                f"'{place}' is no report of 'headprune evaluate' or of 'headprune check', "
                "and no folder of a run."
            )
        return found
    if not place.is_dir():
        raise CheckpointError(f"There is no run at '{place}': give a folder that headprune wrote.")
    try:
        for folder in _folders(place, DEPTH):
            _look_into(folder, found)
    except OSError as error:
        raise CheckpointError(f"'{place}' cannot be read through: {error}.") from None
    if not any(part for name, part in vars(found).items() if name not in ("place", "unfinished")):
        if found.unfinished:
            raise CheckpointError(found.unfinished[0])
        raise CheckpointError(
            f"'{place}' holds nothing to report on: no result ({MANIFEST}), no gates (gates.json), "
            f"no scores ({SCORES}), no roles ({ROLES_FILE}), and no report of "
            "'headprune evaluate' or of 'headprune check'."
        )
    return found


def _folders(place: Path, depth: int) -> Iterator[Path]:
    yield place
    inside_part = any((place / name).is_file() for name in (MANIFEST, gates_folder.METADATA))
    if depth == 0 or inside_part:
        return
    for folder in sorted(place.iterdir()):
        if folder.is_dir() and not folder.name.startswith(".") and folder.name != "checkpoints":
            yield from _folders(folder, depth - 1)


def _look_into(folder: Path, found: Found) -> None:
    if (folder / MANIFEST).is_file():
        found.results.append(
            ResultFolder(folder, read_manifest(folder), read_plan(folder / "plan.json", {}))
        )
    elif (folder / gates_folder.METADATA).is_file():
        model = read_metadata(folder).model
        found.gates.append(GatesFolder(folder, read_gates(folder, model)))
    elif (folder / SCORES).is_file():
        found.scores.append(ScoresFolder(folder, read_scores(folder)))
    elif (command := unfinished(folder)) is not None:
        found.unfinished.append(
            f"The training in '{folder}' is not finished; go on with {command} --resume, or remove "
            "the folder."
        )
    if (folder / ROLES_FILE).is_file():
        found.roles[folder] = read_as(RolesRecord, folder / ROLES_FILE)
    for file in sorted(folder.glob("*.json")):
        try:
            _add_report(file, found)
        except (OSError, CheckpointError):
            if file.name.startswith("report"):
                raise


def _add_report(file: Path, found: Found) -> bool:
    """Adds a report of ``evaluate`` or ``check``; False where a file is something else."""
    small = file.stat().st_size < _LARGEST_JSON
    content = read_json(file) if small else None
    if not isinstance(content, dict):
        return False
    for kind, among in ((CHECK, found.checks), (EVALUATION, found.reports)):
        if kind.fields <= content.keys():
            among[file] = content
            return True
    return False
