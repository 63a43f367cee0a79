"""headprune.json: identity, origin and proof of a result."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from pydantic import ConfigDict, model_validator

from headprune._version import __version__
from headprune.context import CommandProvenance
from headprune.errors import CheckpointError
from headprune.io.folders import digest_of, refuse_links
from headprune.io.parsing import read_as
from headprune.io.writing import write_whole
from headprune.runtime import MANIFEST, RUNTIME
from headprune.schemas.plan import ModelIdentity, Shape
from headprune.schemas.proofs import Proof, Sample, TensorProof
from headprune.schemas.records import (
    Done,
    Evidence,
    Heads,
    Healing,
    Merging,
    ModelChoice,
    Pruning,
    Recorded,
    Refit,
    Window,
    Windowing,
)
from headprune.schemas.values import Count, Digest, Record

CARD = "README.md"
NO_ID = "0" * 64  # until all else is known
HISTORY = "heal.jsonl"  # of a healing, with times in it

BeforeAfter = tuple[Count, Count]


class LineageStep(Record):
    """The record of a result, apart from its files.

    Attributes:
        id: Id of the result (``Manifest.digest``).
        created: UTC time.
        versions: Versions of headprune, torch and transformers that made it.
        provenance: The command, with its resolved options, if it was one.
        source: The model it was made from.
        parent: Id of that model; None where its files are not at hand.
        shape: "native" if a plain config describes the result, else "runtime".
        auto_class: The Auto class of transformers that loads it.
        dtype: Element types of the weights on disk, the commonest first.
        weight_bytes: Bytes of the weights on disk, before and after.
        query_heads: Query heads before and after.
        kv_heads: KV heads before and after.
        parameters: Parameters before and after.
        kv_cache_bytes: KV cache of ``kv_cache_tokens`` before and after, in the commonest of these
            types; 0 for models that generate nothing.
        kv_cache_tokens: 8,192, or as many as the model has positions.
        layout: Per attention module, the remaining heads.
        window: What window heads see; None without any.
        engines: Engines of generated text that hold its shape.
        done: The change.
        refit: The refit of W_O, if there was one.
        choice: The candidates and the choice among them, if there was one.
        proof: Measurements of its proof; None where tensors alone were compared.
        tensor_proof: Result of the comparison of tensors.
    """

    schema_version: Literal[1] = 1
    id: Digest
    created: str
    versions: dict[str, str]
    provenance: CommandProvenance | None = None
    source: ModelIdentity
    parent: Digest | None = None
    shape: Shape
    auto_class: str
    dtype: str
    weight_bytes: BeforeAfter
    query_heads: BeforeAfter
    kv_heads: BeforeAfter
    parameters: BeforeAfter
    kv_cache_bytes: BeforeAfter
    kv_cache_tokens: Count
    layout: dict[str, Heads]
    window: Window | None = None
    engines: tuple[str, ...] = ()
    done: Done
    refit: Refit | None = None
    choice: ModelChoice | None = None
    proof: Proof | None = None
    tensor_proof: TensorProof | None = None

    @model_validator(mode="after")
    def _proven(self) -> LineageStep:
        if self.proof is None and self.tensor_proof is None:
            raise ValueError("it holds no proof")
        return self

    @property
    def proven(self) -> str:
        """The result of the proof, in a few words."""
        if self.proof is not None:
            return f"{self.proof.gated_vs_reloaded:.1e}"
        return "tensors equal"

    @property
    def evidence(self) -> Evidence | None:
        """The evidence of the choice of heads, if there was one and it is known."""
        return self.done.evidence if isinstance(self.done, Pruning | Windowing) else None

    @property
    def changed_weights(self) -> str | None:
        """The change of the weights of heads that stay; None without one."""
        if isinstance(self.done, Merging):
            return "its KV heads were merged"
        if isinstance(self.done, Healing):
            return f"it was healed for {self.done.steps} steps"
        if self.refit is not None:
            return f"its output projections were refitted on '{self.refit.data}' after the cut"
        trained = isinstance(self.done, Pruning) and self.done.trained_weights
        return "its weights came with its gates, trained or refitted" if trained else None

    @property
    def uneven(self) -> bool:
        """True if attention modules differ in their numbers of heads."""
        counts = {
            (len(h.query_heads), len(h.kv_heads), h.group_sizes and len(h.group_sizes))
            for h in self.layout.values()
        }
        return len(counts) > 1


class Manifest(Recorded, LineageStep):
    """The record beside the weights of a result.

    Attributes:
        lineage: The steps that lead to the source, oldest first, if headprune made that.
        probe: Samples of the gated original's outputs, for ``verify``; None where tensors were
            compared.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    lineage: tuple[LineageStep, ...]
    probe: Sample | None = None

    def digest(self) -> str:
        """Return the id: SHA-256 of the result and its making.

        It covers the files, the parent's id, the change with its evidence, and the refit.
        Times, versions, measurements, and names of text and teacher have no part in it.
        """
        content = self.model_dump(
            mode="json",
            include={"files", "parent", "done", "refit"},
            exclude={"files": {HISTORY}, "done": {"teacher"}, "refit": {"data"}},
            exclude_none=True,
        )
        return digest_of(content)

    @property
    def brings_code(self) -> bool:
        """True if the code of a custom model lies in the folder."""
        code = (name for name in self.files if name.startswith("modeling_"))
        return any(name != RUNTIME for name in code)

    @property
    def steps(self) -> tuple[LineageStep, ...]:
        """The steps to the result, oldest first, and its own."""
        return (*self.lineage, self)


def utc_now() -> str:
    """Return UTC time in milliseconds, which orders measurements, also within a second."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return {
        "headprune": __version__,
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
    }


def write_manifest(folder: Path, unnamed: Manifest) -> Manifest:
    """Write the manifest of a finished folder, and return it with its id."""
    manifest = unnamed.model_copy(update={"id": unnamed.digest()})
    _write(folder, manifest)
    return manifest


def amend_manifest(folder: Path, **facts: Any) -> Manifest:
    """Add facts to a manifest that its id does not depend on."""
    manifest = read_manifest(folder)
    amended = manifest.model_copy(update=facts)
    assert amended.digest() == manifest.digest()
    _write(folder, amended)
    return amended


def _write(folder: Path, manifest: Manifest) -> None:
    write_whole(folder / MANIFEST, manifest.model_dump_json(indent=2) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a result.

    Raises:
        CheckpointError: If there is none, or it is damaged or of a later schema.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"There is no folder '{folder}'. Give one that headprune wrote.")
    refuse_links(folder)
    if not path.is_file():
        raise CheckpointError(
            f"'{folder}' has no {MANIFEST}, so it is no result of prune, convert-gqa, heal, "
            "compress or migrate."
        )
    return read_as(Manifest, path)


def contents(folder: Path) -> Iterator[str]:
    """Yield the files of a manifest: all but itself, the card and hidden ones."""
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        hidden = any(part.startswith(".") for part in inside.parts)
        if not (file.is_dir() or hidden or inside.as_posix() in (MANIFEST, CARD)):
            yield inside.as_posix()


def read_lineage(folder: Path) -> tuple[LineageStep, ...]:
    """Return the steps that lead to a folder, oldest first; none if headprune did not make it.

    Raises:
        CheckpointError: If its manifest is damaged.
    """
    if not (folder / MANIFEST).is_file():
        return ()
    manifest = read_manifest(folder)
    last = LineageStep.model_validate(manifest.model_dump(include=set(LineageStep.model_fields)))
    return (*manifest.lineage, last)
