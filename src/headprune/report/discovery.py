"""What lies in the folders that a report is asked for, found by content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from headprune.checkpoint import gates as gates_folder
from headprune.checkpoint.gates import TrainedGates, read_gates, read_metadata
from headprune.checkpoint.manifest import Manifest, read_manifest
from headprune.checkpoint.runs import read_run
from headprune.checkpoint.scores import METADATA as SCORES
from headprune.checkpoint.scores import ScoresMetadata, read_scores
from headprune.checkpoint.sweeps import SWEEP, Sweep
from headprune.errors import CheckpointError, HeadpruneError
from headprune.parsing import read_as, read_json, read_yaml, validated
from headprune.plan import Plan, read_plan
from headprune.report.heads import spread
from headprune.report.lineage import Made, made
from headprune.runtime import MANIFEST
from headprune.training.work import unfinished

_CHECK = {"verdict", "limits", "judge_s"}  # what a report of check has, and no other
MOST_HEADS = 65_536  # the largest models have a quarter of it
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

    chain: tuple[Made, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """What its record is known by in the lineage of what is made of it."""
        return self.chain[-1].key


@dataclass(frozen=True)
class ScoresFolder:
    """Scores of units, by criterion."""

    path: Path
    metadata: ScoresMetadata
    scores: dict[str, Tensor]


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
    """The parts in one place."""

    place: Path
    results: list[ResultFolder] = field(default_factory=list)
    gates: list[GatesFolder] = field(default_factory=list)
    scores: list[ScoresFolder] = field(default_factory=list)
    reports: dict[Path, dict[str, Any]] = field(default_factory=dict)
    sweeps: dict[Path, Sweep] = field(default_factory=dict)
    checks: dict[Path, dict[str, Any]] = field(default_factory=dict)

    @property
    def tips(self) -> list[ResultFolder]:
        """The results that no other result here was made of."""
        made_from = {step.key for result in self.results for step in result.chain[:-1]}
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
        found.gates.append(_gates(folder))
    elif (folder / SCORES).is_file():
        found.scores.append(_scores(folder))
    elif (folder / SWEEP).is_file():
        found.sweeps[folder] = read_as(Sweep, folder / SWEEP)
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
    path, manifest = folder / MANIFEST, read_manifest(folder)
    own = manifest.model_dump(mode="json", exclude={"lineage", "files", "probe"})
    chain = tuple(made(record, path) for record in (*manifest.lineage, own))
    for step in chain:
        _refuse_absurd(path, [left.query_heads for left in step.layout.values()])
    plan = read_plan(folder / "plan.json", {})
    parts = plan.attentions.values()
    _refuse_absurd(folder / "plan.json", [(*p.keep, p.query_heads, p.kv_heads) for p in parts])
    return ResultFolder(folder, manifest, plan, chain)


def _gates(folder: Path) -> GatesFolder:
    metadata = read_metadata(folder)
    sizes = ((metadata.query_heads,), *((sum(sizes),) for sizes in metadata.group_sizes))
    _refuse_absurd(folder / gates_folder.METADATA, [*metadata.heads, *sizes])
    return GatesFolder(folder, read_gates(folder, metadata.model))


def _scores(folder: Path) -> ScoresFolder:
    read = read_scores(folder)
    _refuse_absurd(folder / SCORES, [(read.metadata.query_heads,)])
    return ScoresFolder(folder, read.metadata, read.scores)


def _refuse_absurd(path: Path, modules: Sequence[Sequence[int]]) -> None:
    """Refuses to draw heads that no model has, by the largest id or count of every module."""
    heads = sum(max(numbers, default=0) for numbers in modules)
    if max(heads, len(modules)) > MOST_HEADS:
        raise CheckpointError(
            f"'{path}' is damaged: it tells of {max(heads, len(modules)):,} heads, more than any "
            "model has."
        )


def _evaluation(file: Path, required: bool) -> dict[str, Any] | None:
    """The content of a report of ``evaluate`` or ``check``; None where it is something else."""
    try:
        small = file.stat().st_size < _LARGEST_JSON
        content = read_json(file) if small else None
    except (OSError, CheckpointError):
        if required or file.name.startswith("report"):
            raise
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
