"""headprune.json: what a result is, where it comes from, and its proof."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers
from pydantic import ConfigDict, ValidationError, field_validator

from headprune._version import __version__
from headprune.checkpoint.folders import sha256_of
from headprune.errors import CheckpointError
from headprune.parsing import first_problem, read_as
from headprune.plan import ModelIdentity, Shape
from headprune.records import Count, Proof, Recorded, Sample
from headprune.runtime import MANIFEST

CARD = "README.md"


class Manifest(Recorded):
    """The record beside the weights of a result.

    Attributes:
        created: UTC time.
        versions: Versions of headprune, torch and transformers that made it.
        source: The model it was made from.
        lineage: Manifests of the source, oldest first, if headprune made that as well.
        shape: "native" if a plain config describes the result, else "runtime".
        auto_class: The Auto class of transformers that loads it; None in older manifests, as are
            the next two.
        dtype: Element types of the weights on disk, the commonest first.
        weight_bytes: Bytes of the weights on disk, before and after.
        query_heads: Query heads before and after.
        kv_heads: KV heads before and after.
        parameters: Parameters before and after.
        trained_weights: Whether weights beside the gates were trained before the cut.
        sharing: How KV heads were merged, if they were.
        healing: How it was trained to match another model, if it was.
        refit: How W_O made up for the heads that went, if it did.
        proof: What the proof measured.
        probe: Some of the gated original's outputs on the proof's inputs, for ``verify``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    created: str
    versions: dict[str, str]
    source: ModelIdentity
    lineage: tuple[dict[str, Any], ...]
    shape: Shape
    auto_class: str | None = None
    dtype: str | None = None
    weight_bytes: tuple[Count, Count] | None = None
    query_heads: tuple[Count, Count]
    kv_heads: tuple[Count, Count]
    parameters: tuple[Count, Count]
    trained_weights: bool = False
    sharing: dict[str, Any] | None = None
    healing: dict[str, Any] | None = None
    refit: dict[str, Any] | None = None
    proof: Proof
    probe: Sample

    @field_validator("lineage")
    @classmethod
    def _named(cls, lineage: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        try:
            for step in lineage:
                ModelIdentity.model_validate(step.get("source"))
        except ValidationError as problem:
            raise ValueError(f"the source of a step: {first_problem(problem)}") from None
        return lineage

    @property
    def uneven(self) -> bool:
        """Whether attention modules differ in their numbers of heads."""
        return len({tuple(map(len, h.as_json().values())) for h in self.layout.values()}) > 1


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    return {
        "headprune": __version__,
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
    }


def write_manifest(folder: Path, **facts: Any) -> Manifest:
    """Hashes the files of a finished folder and writes its manifest beside them.

    Args:
        folder: The result.
        **facts: The other fields of ``Manifest``.
    """
    files = {name: sha256_of(folder / name) for name in contents(folder)}
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    manifest = Manifest(created=created, versions=versions(), files=files, **facts)
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a result.

    Raises:
        CheckpointError: If there is none, or it is damaged or of a later schema.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"There is no folder '{folder}'. Give one that headprune wrote.")
    if not path.is_file():
        raise CheckpointError(
            f"'{folder}' has no {MANIFEST}, so headprune did not write it; prune and migrate do."
        )
    return read_as(Manifest, path)


def contents(folder: Path) -> Iterator[str]:
    """The files that a manifest vouches for: all but itself, the card and hidden ones."""
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        hidden = any(part.startswith(".") for part in inside.parts)
        if not (file.is_dir() or hidden or inside.as_posix() in (MANIFEST, CARD)):
            yield inside.as_posix()


def read_lineage(folder: Path) -> tuple[dict[str, Any], ...]:
    """The manifests that lead to a folder, oldest first; none if headprune did not make it.

    Raises:
        CheckpointError: If the last of them is damaged.
    """
    if not (folder / MANIFEST).is_file():
        return ()
    manifest = read_manifest(folder)
    last = manifest.model_dump(
        mode="json", exclude={"lineage", "files", "probe"}, exclude_unset=True
    )
    return (*manifest.lineage, last)
