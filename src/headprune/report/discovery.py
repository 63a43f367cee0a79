"""What lies in the folders that a report is asked for, found by content."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from headprune.checkpoint import gates as gates_folder
from headprune.checkpoint.gates import TrainedGates, read_gates, read_metadata
from headprune.checkpoint.manifest import Manifest, read_manifest
from headprune.checkpoint.runs import read_run
from headprune.errors import CheckpointError, HeadpruneError
from headprune.plan import Plan, read_plan
from headprune.report.heads import spread
from headprune.runtime import MANIFEST
from headprune.training.work import unfinished

_CHECK = {"verdict", "limits", "judge_s"}  # what a report of check has, and no other
SCORES, SWEEP = "scores.json", "sweep.json"
DEPTH = 3
_LARGEST_JSON = 50_000_000  # bytes; a report of evaluate is far smaller


@dataclass(frozen=True)
class GatesFolder:
    """Finished gates."""

    path: Path
    trained: TrainedGates

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings of the training, as its config.yaml has them."""
        return read_yaml(self.path / "config.yaml")


@dataclass(frozen=True)
class ResultFolder:
    """A model that headprune wrote."""

    path: Path
    manifest: Manifest
    plan: Plan

    @property
    def key(self) -> tuple[object, ...]:
        """What its record is known by in the lineage of what is made of it."""
        return record_key(self.manifest.model_dump(mode="json"))


@dataclass(frozen=True)
class ScoresFolder:
    """Scores of units, by criterion."""

    path: Path
    metadata: dict[str, Any]
    scores: dict[str, Tensor]


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings in a file; none where it is missing, or holds something else."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def record_key(record: Mapping[str, Any]) -> tuple[object, ...]:
    """Tells records apart; times alone do not, as small models take less than a second."""
    source, proof = record.get("source") or {}, record.get("proof") or {}
    parts = (record.get("created"), source.get("fingerprint"), str(record.get("parameters")))
    return (*parts, proof.get("gated_vs_reloaded"), proof.get("gated_vs_cut"))


@dataclass
class Found:
    """The parts in one place."""

    place: Path
    results: list[ResultFolder] = field(default_factory=list)
    gates: list[GatesFolder] = field(default_factory=list)
    scores: list[ScoresFolder] = field(default_factory=list)
    reports: dict[Path, dict[str, Any]] = field(default_factory=dict)
    sweeps: dict[Path, dict[str, Any]] = field(default_factory=dict)
    checks: dict[Path, dict[str, Any]] = field(default_factory=dict)

    @property
    def tips(self) -> list[ResultFolder]:
        """The results that no other result here was made of."""
        made_from = {record_key(step) for r in self.results for step in r.manifest.lineage}
        return [result for result in self.results if result.key not in made_from]


def discover(place: Path) -> Found:
    """Finds results, gates, scores and evaluations in a folder, some levels deep.

    Args:
        place: A folder, or a report that ``headprune evaluate`` wrote.

    Raises:
        CheckpointError: If nothing is there, something is damaged, or a run is not finished.
    """
    found = Found(place)
    if place.is_file():
        content = _evaluation(place, required=True)
        assert content is not None
        found.reports[place] = content
        return found
    if not place.is_dir():
        raise CheckpointError(f"There is no run at '{place}': give a folder that headprune wrote.")
    _refuse_half_done(place)
    try:
        for folder in _folders(place, DEPTH):
            _look_into(folder, found)
    except OSError as error:
        raise CheckpointError(f"'{place}' cannot be read through: {error}.") from None
    if not (found.results or found.gates or found.scores or found.reports or found.sweeps):
        raise CheckpointError(
            f"'{place}' holds nothing to report on: no result ({MANIFEST}), no gates (gates.json), "
            f"no scores ({SCORES}), no sweep ({SWEEP}), and no report that 'headprune evaluate "
            "--output' wrote."
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
        found.results.append(_result(folder))
    elif (folder / gates_folder.METADATA).is_file():
        metadata = read_metadata(folder)
        found.gates.append(GatesFolder(folder, read_gates(folder, metadata.model)))
    elif (folder / SCORES).is_file():
        found.scores.append(_scores(folder))
    elif (folder / SWEEP).is_file():
        found.sweeps[folder] = _sweep(folder / SWEEP)
    elif (folder / "points").is_dir() and (folder / "config.yaml").is_file():
        raise CheckpointError(
            f"The sweep in '{folder}' is not finished; the same command again goes on with it."
        )
    elif (command := unfinished(folder)) is not None:
        raise CheckpointError(
            f"The training in '{folder}' is not finished; go on with {command} --resume, or remove "
            "the folder."
        )
    for file in sorted(folder.glob("*.json")):
        content = _evaluation(file, required=False)
        if content is not None and set(content) >= _CHECK:
            found.checks[file] = content
        elif content is not None:
            found.reports[file] = content


def _refuse_half_done(place: Path) -> None:
    """Refuses the folder of a recipe's run that stopped in a step; a report is a step itself."""
    record = read_run(place)
    steps = record.steps if record is not None else {}
    undone = [name for name, step in steps.items() if not step.done and step.step != "report"]
    if undone:
        raise CheckpointError(
            f"The run in '{place}' is not finished (step '{undone[0]}'): headprune run with the "
            "same recipe goes on with it."
        )


def _result(folder: Path) -> ResultFolder:
    manifest = read_manifest(folder)
    return ResultFolder(folder, manifest, read_plan(folder / "plan.json", {}))


def _sweep(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for point in (content["base"], *content["points"]):
            for name in ("criterion", "keep", "refit", "query_heads", "parameters", "quality"):
                point[name]
        content["metric"], content["higher_is_better"], content["points"][0]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"The sweep '{path}' cannot be read: {error}.") from None
    return content


def _scores(folder: Path) -> ScoresFolder:
    path = folder / SCORES
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
        tensors = load_file(path.with_suffix(".safetensors"))
        for name in ("model", "unit", "modules"):
            metadata[name]
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"The scores in '{folder}' cannot be read: {error}.") from None
    return ScoresFolder(folder, metadata, tensors)


def _evaluation(file: Path, required: bool) -> dict[str, Any] | None:
    """The content of a report of ``evaluate`` or ``check``; None where it is something else."""
    try:
        small = file.stat().st_size < _LARGEST_JSON
        content = json.loads(file.read_text(encoding="utf-8")) if small else None
    except (OSError, ValueError) as error:
        if required or file.name.startswith("report"):
            why = str(error).splitlines()[0]
            raise CheckpointError(f"The report '{file}' cannot be read: {why}.") from None
        return None
    if isinstance(content, dict) and {"provenance", "model", "differences"} <= set(content):
        return content
    if isinstance(content, dict) and set(content) >= _CHECK and not required:
        return content
    if required:
        raise CheckpointError(
            f"'{file}' is no report of 'headprune evaluate --output', and no folder of a run."
        )
    return None


def gates_of(result: ResultFolder, candidates: Sequence[GatesFolder]) -> GatesFolder | None:
    """The gates that a result was cut by: those whose factors its plan holds."""
    return next((gates for gates in candidates if _cut_by(result, gates)), None)


def _cut_by(result: ResultFolder, gates: GatesFolder) -> bool:
    metadata, plan = gates.trained.metadata, result.plan
    model = result.manifest.source.fingerprint
    if metadata.model.fingerprint != model or metadata.unit is not plan.unit:
        return False
    try:
        factors = dict(zip(metadata.modules, _per_head(gates, plan), strict=True))
    except HeadpruneError:
        return False
    for path, part in plan.attentions.items():
        of_module = factors.get(path)
        if of_module is None:
            continue
        if part.scale is None:
            return False
        for head, scale in zip(part.keep, part.scale, strict=True):
            factor = of_module.get(head)
            # heads that --keep brings back are open as in the original
            if factor is None or abs(scale - (factor or 1.0)) > 1e-6:
                return False
    return True


def _per_head(gates: GatesFolder, plan: Plan) -> list[dict[int, float]]:
    rows = spread(gates.trained.metadata, plan)
    values = gates.trained.value.tolist()
    return [{head: values[unit] for head, unit in row.units.items()} for row in rows]
