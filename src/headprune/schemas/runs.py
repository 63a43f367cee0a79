"""The folder of a recipe's run: what was asked, what was made of what, and whether it still is.

recipe.yaml        the recipe with all its settings; it runs like the one that was read
requirements.lock  versions of everything that was installed for it, for pip install -r
run.json           per step: hash of its inputs, hashes of its files, time, result in a line
STEP/              the output of a step, under the step's name
.partial/          what a step is working on; gone when the run is done
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from packaging.requirements import Requirement
from pydantic import BaseModel, ConfigDict, Field

from headprune.errors import CheckpointError
from headprune.io.folders import digest_of, hashes_of
from headprune.io.parsing import read_as
from headprune.io.writing import write_whole
from headprune.runtime import MANIFEST
from headprune.schemas.manifest import read_manifest

RECORD, RECIPE, LOCK, PARTIAL = "run.json", "recipe.yaml", "requirements.lock", ".partial"

# records of how an output came about, with times in them: another run of the same step makes others
_RECORDS = (
    *("headprune.json", "scores.json", "README.md", "config.yaml"),
    *("history.jsonl", "heal.jsonl"),
)


class StepRecord(BaseModel):
    """What became of one step.

    Attributes:
        step: Its kind.
        key: Hash of ``inputs``; the output is up to date as long as this stays the same.
        inputs: Settings, versions, and digests of the models, data and outputs that it takes.
        started: UTC time.
        seconds: How long it took; None while it is not done.
        files: SHA-256 of every file of its output.
        model_id: Id of the model that it made, if it made one; None in older records.
        summary: The result in a line.
        passed: False if the step found that a limit is broken.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: str
    key: str
    inputs: dict[str, Any]
    started: str
    seconds: Annotated[float, Field(ge=0)] | None = None
    files: dict[str, str] = {}
    model_id: str | None = None
    summary: str = ""
    passed: bool = True

    @property
    def done(self) -> bool:
        """Whether the step came to its end."""
        return self.seconds is not None

    @property
    def digest(self) -> str:
        """Digest of what later steps take from its output: weights, gates, plan, numbers."""
        return _digest(self.files, self.model_id)


class RunRecord(BaseModel):
    """What became of a recipe.

    Attributes:
        name: Name of the recipe.
        versions: Versions of headprune, torch and transformers that it last ran with.
        steps: What became of its steps, by their names, in order.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    name: str
    versions: dict[str, str]
    steps: dict[str, StepRecord] = {}

    def with_step(self, name: str, step: StepRecord) -> RunRecord:
        """The same record with another entry for a step, which comes last if it is new."""
        return self.model_copy(update={"steps": {**self.steps, name: step}})

    def write(self, folder: Path) -> None:
        """Writes run.json whole or not at all."""
        write_whole(folder / RECORD, self.model_dump_json(indent=2) + "\n")


def read_run(folder: Path) -> RunRecord | None:
    """Reads the record of a run; None where there is none.

    Raises:
        CheckpointError: If it is damaged, or of a later schema.
    """
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        return read_as(RunRecord, path)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} Choose another output (--set output=FOLDER) or move '{folder}' away; there, "
            "every step runs anew."
        ) from None


def hashes(place: Path) -> dict[str, str]:
    """SHA-256 of every file of a folder, or of the one file; hidden ones are not counted.

    Raises:
        CheckpointError: If one cannot be read.
    """
    try:
        if place.is_file():
            return hashes_of(place.parent, [place.name])
        inside = sorted(file for file in place.rglob("*") if file.is_file())
        names = (str(file.relative_to(place)) for file in inside)
        return hashes_of(place, (name for name in names if not name.startswith(".")))
    except OSError as error:
        raise CheckpointError(f"'{place}' cannot be read through: {error}.") from None


def digest_of_place(place: Path) -> str:
    """Digest of one file, or of a folder's files but for records with times in them."""
    if place.is_file():
        return digest_of(hashes(place))
    return _digest(hashes(place), id_of_result(place))


def id_of_result(place: Path) -> str | None:
    """The id of a model that headprune made; None of anything else.

    Raises:
        CheckpointError: If its manifest is damaged.
    """
    return read_manifest(place).id if (place / MANIFEST).is_file() else None


def _digest(files: dict[str, str], model_id: str | None) -> str:
    """Digest of all files but records, and of the id by which measurements know a model."""
    lasting = {name: sha256 for name, sha256 in files.items() if Path(name).name not in _RECORDS}
    return digest_of(lasting if model_id is None else {**lasting, MANIFEST: model_id})


def write_lock(folder: Path) -> None:
    """Writes the versions of headprune and of all that it needs, in the form of pip."""
    pins = [f"{name}=={version}" for name, version in sorted(_installed("headprune", set()))]
    head = f"# Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    write_whole(folder / LOCK, "\n".join([head, *pins]) + "\n")


def _installed(name: str, seen: set[str]) -> Iterator[tuple[str, str]]:
    seen.add(name)
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return
    yield found.metadata["Name"].lower(), found.version
    for line in found.requires or ():
        needed = Requirement(line)
        wanted = needed.marker is None or needed.marker.evaluate({"extra": ""})
        if wanted and needed.name.lower() not in seen:
            yield from _installed(needed.name.lower(), seen)
