"""headprune.json: what a result is, where it comes from, and its proof."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from pydantic import BaseModel, ConfigDict

from headprune._version import __version__
from headprune.checkpoint.folders import sha256_of
from headprune.errors import CheckpointError
from headprune.plan import ModelIdentity, Shape
from headprune.runtime import MANIFEST


class Manifest(BaseModel):
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
        layout: Ids of the heads that are left, per module; those of the model before any cut.
        sharing: How KV heads were merged, if they were.
        healing: How it was trained to match another model, if it was.
        refit: How W_O made up for the heads that went, if it did.
        proof: What the proof measured.
        probe: Some of the gated original's outputs on the proof's inputs, for ``verify``.
        files: SHA-256 of every other file of the folder, but for the model card.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    created: str
    versions: dict[str, str]
    source: ModelIdentity
    lineage: tuple[dict[str, Any], ...]
    shape: Shape
    auto_class: str | None = None
    dtype: str | None = None
    weight_bytes: tuple[int, int] | None = None
    query_heads: tuple[int, int]
    kv_heads: tuple[int, int]
    parameters: tuple[int, int]
    layout: dict[str, dict[str, list[int]]] = {}
    trained_weights: bool = False
    sharing: dict[str, Any] | None = None
    healing: dict[str, Any] | None = None
    refit: dict[str, Any] | None = None
    proof: dict[str, Any]
    probe: dict[str, Any]
    files: dict[str, str]

    @property
    def uneven(self) -> bool:
        """Whether attention modules differ in their numbers of heads."""
        return len({tuple(map(len, heads.values())) for heads in self.layout.values()}) > 1


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
    files = {
        str(file.relative_to(folder)): sha256_of(file)
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name not in (MANIFEST, "README.md")
    }
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
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.get("schema_version", 1) > 1:
            raise CheckpointError(
                f"'{path}' has schema {content['schema_version']}; this headprune reads 1. Upgrade "
                "headprune."
            )
        return Manifest.model_validate(content)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"'{path}' is damaged: {str(error).splitlines()[0]}.") from None


def read_lineage(folder: Path) -> tuple[dict[str, Any], ...]:
    """The manifests that lead to a folder, oldest first; none if headprune did not make it."""
    path = folder / MANIFEST
    if not path.is_file():
        return ()
    content = json.loads(path.read_text(encoding="utf-8"))
    earlier = content.pop("lineage", ())
    for bulky in ("files", "probe"):
        content.pop(bulky, None)
    return (*earlier, content)
