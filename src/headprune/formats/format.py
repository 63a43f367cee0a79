"""A format, and the record of an export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from headprune.config import ExportConfig, ExportDtype
from headprune.context import CommandProvenance
from headprune.formats.checkpoint import OnStep
from headprune.formats.source import ExportSource
from headprune.io.ownership import EXPORTED
from headprune.io.parsing import read_as
from headprune.schemas.values import Digest, Record


class ExportProof(Record):
    """The comparison of an exported model with its source.

    Attributes:
        how: "engine": the engine ran it. "read back": the files were read instead.
        engine: The engine or the reader, with its version.
        why_not: Why no engine ran it.
        compared: The compared numbers.
        difference: Largest difference.
        tolerance: Largest difference allowed.
        details: Further numbers, by name.
    """

    how: Literal["engine", "read back"]
    engine: str
    why_not: str = ""
    compared: str
    difference: float
    tolerance: float
    details: dict[str, float] = Field({})

    @property
    def passed(self) -> bool:
        """True if the difference is within the tolerance; NaN is not."""
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        how = f"run by {self.engine}"
        if self.how == "read back":
            how = f"read back by {self.engine}, as {self.why_not}"
        rest = "".join(f", {name} {number:.3g}" for name, number in self.details.items())
        gap = f"{self.difference:.1e} apart, {self.tolerance:.0e} allowed"
        return f"{how}: {self.compared} {gap}{rest}"


class ExportRecord(Record):
    """The record beside an exported model.

    Attributes:
        created: UTC time.
        versions: Versions of headprune, torch and transformers.
        provenance: The command with its resolved options, if it was one.
        format: The format.
        model: Folder of the source.
        id: Id of the source.
        changes: Differences from the source that change no number, a sentence each.
        proof: How it was compared with the source.
        files: SHA-256 of every other file.
    """

    schema_version: Literal[1] = 1
    created: str
    versions: dict[str, str]
    provenance: CommandProvenance | None = None
    format: str
    model: str
    id: Digest | None
    changes: tuple[str, ...] = ()
    proof: ExportProof
    files: dict[str, Digest]


def is_exported(model: str | Path) -> bool:
    """Return whether ``headprune export`` wrote a folder."""
    return (Path(model) / EXPORTED).is_file()


def read_export(folder: Path) -> ExportRecord:
    """Read the record of an exported model.

    Raises:
        CheckpointError: If it is missing or damaged.
    """
    return read_as(ExportRecord, folder / EXPORTED)


@dataclass(frozen=True)
class Format:
    """A way to write a model for an engine.

    Attributes:
        what: The files, and the engines that run them.
        refusal: Return why it cannot hold a model, as a sentence; None if it can.
        write: Write a model into an empty folder; return ``ExportRecord.changes``.
        prove: Compare the folder with the model, in the engine where it is installed.
        dtypes: Element types of weights beside "auto".
        modules: Packages that writing needs.
        serve: The command that serves the folder, "{}" in it.
    """

    what: str
    refusal: Callable[[ExportSource, ExportConfig], str | None]
    write: Callable[[ExportSource, Path, ExportConfig, OnStep], tuple[str, ...]]
    prove: Callable[[ExportSource, Path, ExportConfig], ExportProof]
    dtypes: tuple[ExportDtype, ...] = ()
    modules: tuple[str, ...] = ()
    serve: str = ""
