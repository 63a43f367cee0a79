"""export.json: what an exported model is, what it was made of, and how it was proven."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from headprune.context import MadeBy
from headprune.io.ownership import EXPORTED
from headprune.io.parsing import read_as
from headprune.schemas.values import Digest


class ExportProof(BaseModel):
    """How an exported model was compared with the model that it was made of.

    Attributes:
        how: "engine" where the engine ran it, "read back" where its file was read instead.
        engine: The engine or the library that did so, with its version.
        compared: What was compared.
        difference: The largest difference.
        tolerance: What it was held to.
        details: Further numbers, by name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    how: Literal["engine", "read back"]
    engine: str
    compared: str
    difference: float
    tolerance: float
    details: dict[str, float] = {}

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance; NaN is not."""
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        ran = f"run by {self.engine}" if self.how == "engine" else f"read back by {self.engine}"
        rest = "".join(f", {name} {number:.3g}" for name, number in self.details.items())
        gap = f"{self.difference:.1e} apart, {self.tolerance:.0e} allowed"
        return f"{ran}: {self.compared} {gap}{rest}"


class ExportRecord(BaseModel):
    """The record beside an exported model.

    Attributes:
        created: UTC time.
        versions: Versions of headprune, torch and transformers that made it.
        made_by: The command with its resolved options, if it was one.
        format: The format.
        model: Folder of the model that it was made of.
        id: Id of that model.
        changes: What is written otherwise than it is in the model, and computes the same.
        proof: How it was compared with the model.
        files: SHA-256 of every other file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    created: str
    versions: dict[str, str]
    made_by: MadeBy | None = None
    format: str
    model: str
    id: Digest | None
    changes: tuple[str, ...] = ()
    proof: ExportProof
    files: dict[str, Digest]


def read_export(folder: Path) -> ExportRecord:
    """Reads the record of an exported model.

    Raises:
        CheckpointError: If it is missing, damaged or of a later schema.
    """
    return read_as(ExportRecord, folder / EXPORTED)
