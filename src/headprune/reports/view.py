"""What a report shows: plain objects; ``reading`` and a pipeline make them of files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headprune.schemas.manifest import LineageStep, Manifest
from headprune.schemas.roles import RolesRecord

State = Literal["kept", "removed", "earlier", "scored"]
Facts = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Cell:
    """One head of the map.

    Attributes:
        head: Its id.
        state: Whether it stays, was removed by this run, was gone before, or was only scored.
        evidence: What speaks for it; None where nothing was measured.
        facts: What else is known of it.
    """

    head: int
    state: State
    evidence: float | None
    facts: Facts = ()


@dataclass(frozen=True)
class Layer:
    """One attention module of the map.

    Attributes:
        path: Module path; the key of plans.
        label: What of it differs from the others.
        cells: Its heads.
        group: Query heads per KV head, where they are equal; 1 otherwise.
    """

    path: str
    label: str
    cells: tuple[Cell, ...]
    group: int = 1

    @property
    def kept(self) -> int:
        """Heads that stay."""
        return sum(cell.state in ("kept", "scored") for cell in self.cells)


@dataclass(frozen=True)
class HeadMap:
    """Layer by head: evidence, and what stays.

    Attributes:
        layers: The attention modules, in order.
        evidence: What the evidence is; None without.
    """

    layers: tuple[Layer, ...]
    evidence: str | None = None

    @property
    def only_scored(self) -> bool:
        """Whether nothing has been chosen yet."""
        return any(cell.state == "scored" for layer in self.layers for cell in layer.cells)


@dataclass(frozen=True)
class History:
    """A training, thinned to as many points as a drawing can show.

    Attributes:
        kind: Whether gates were trained, or a result healed.
        steps: Steps that are shown.
        loss: Mean loss of the steps up to each of them.
        expected: Expected number of open heads; empty where none was recorded.
        target: The number asked for; empty likewise.
        phases: Where something began, and what.
        records: Steps in the file.
    """

    kind: Literal["gates", "heal"]
    steps: tuple[int, ...]
    loss: tuple[float, ...]
    expected: tuple[float, ...]
    target: tuple[float, ...]
    phases: tuple[tuple[float, str], ...]
    records: int


@dataclass(frozen=True)
class ShownInterval:
    """An estimate with its interval; ``kind`` is "ratio" or "difference" to the base."""

    kind: str
    estimate: float
    low: float
    high: float
    confidence: float
    n: int


@dataclass(frozen=True)
class Quality:
    """One metric, of the model and of its base."""

    name: str
    value: float
    base: float | None
    higher_is_better: bool
    n: int
    interval: ShownInterval | None


@dataclass(frozen=True)
class Size:
    """Sizes and speed of one model, as ``evaluate`` measured them; None where it did not."""

    parameters: int
    attention_parameters: int
    query_heads: int
    kv_heads: int
    kv_cache_bytes_per_token: int
    longest_context: int | None
    prefill_tokens_per_s: float | None
    decode_by_batch: tuple[tuple[int, float], ...]
    peak_memory_bytes: int | None
    device: str | None


@dataclass(frozen=True)
class ShownEvaluation:
    """What ``headprune evaluate`` measured.

    Attributes:
        id: Id of the report.
        created: When it was measured, UTC.
        measured: Id of the model; None where its files were not at hand.
        measured_base: Id of the base, likewise.
        model: The model, as it was named.
        base: What it was compared with, if anything.
        file: Where the report lies.
        data: Source of the examples.
        data_sha256: Their digest: only what was measured on the same examples is drawn together.
        conditions: What else must be the same for that: settings, element types and engines.
        qualities: The metrics.
        size: Sizes and speed of the model.
        base_size: The same of its base.
        memory: Bytes that ``longest_context`` fits into.
        provenance: Time, platform, versions, settings.
        needle: Retrieval by context length and depth: columns and rows; no rows without.
        of_original: Whether the base is what the run began with.
    """

    id: str
    created: str
    measured: str | None
    measured_base: str | None
    model: str
    base: str | None
    file: Path
    data: str
    data_sha256: str
    qualities: tuple[Quality, ...]
    size: Size
    base_size: Size | None
    memory: int | None
    provenance: Facts
    conditions: tuple[str, ...] = ()
    needle: tuple[list[str], list[list[str]]] = ([], [])
    of_original: bool = True

    @property
    def beside(self) -> str:
        """What its base is called."""
        if self.of_original:
            return "original"
        base = self.base or ""
        short = Path(base).name
        return base if short in ("", Path(self.model).name) else short

    @property
    def the_base(self) -> str:
        """The same within a sentence."""
        return "the original" if self.of_original else self.beside

    @property
    def original_size(self) -> Size | None:
        """Sizes of what the run began with, if that was measured beside it."""
        return self.base_size if self.of_original else None

    @property
    def main(self) -> Quality | None:
        """The metric that leads: the first that the base has as well."""
        of_both = [quality for quality in self.qualities if quality.base is not None]
        return next(iter([*of_both, *self.qualities]), None)


@dataclass(frozen=True)
class ShownCheck:
    """What ``check`` found about a model.

    Attributes:
        id: Id of the report.
        measured: Id of the model; None where its files were not at hand.
        model: Folder or hub id.
        file: Where the report lies.
        verdict: The worst of all verdicts.
        passed: Whether nothing is broken.
        rows: Per limit: its text, what was found, its verdict.
    """

    id: str
    measured: str | None
    model: str
    file: Path
    verdict: str
    passed: bool
    rows: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class ShownRun:
    """One run: what was asked, and what came out.

    Attributes:
        name: What the report calls it: the name of its folder, made unique.
        folder: Where it lies.
        source: The model it began with.
        asked: What was asked for.
        manifest: The record of the result, if there is one.
        settings: How gates were trained.
        head_map: The heads, if it is known which.
        histories: Trainings.
        evaluations: What was measured; that of the result comes first.
        provenance: Where it comes from.
        checks: Limits that its result was held to.
        roles: What became of roles, a row each; see ``ROLE_COLUMNS``.
        role_record: What its heads do, for the pictures.
    """

    name: str
    folder: Path
    source: str
    asked: str
    manifest: Manifest | None = None
    settings: Facts = ()
    head_map: HeadMap | None = None
    histories: tuple[History, ...] = ()
    evaluations: tuple[ShownEvaluation, ...] = ()
    provenance: Facts = ()
    checks: tuple[ShownCheck, ...] = ()
    roles: Sequence[Sequence[str]] = ()
    role_record: RolesRecord | None = None

    @property
    def chain(self) -> tuple[LineageStep, ...]:
        """What commands made of the source, oldest first; the result comes last."""
        return self.manifest.steps if self.manifest is not None else ()

    @property
    def evaluation(self) -> ShownEvaluation | None:
        """That of the result; where there is none, the first."""
        measured = (
            self.evaluations
            if self.manifest is None
            else (e for e in self.evaluations if e.measured == self.manifest.id)
        )
        return next(iter(measured), None)
