"""What a result says of itself, as types: the heads that are left, the proof, the probe.

They stand in ``config.headprune`` and in headprune.json, and are checked once, as those are read.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_serializer,
    model_validator,
)

from headprune.runtime import MANIFEST
from headprune.runtime.modeling_headprune import check_heads

Finite = Annotated[float, Field(allow_inf_nan=False)]
Difference = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, strict=True)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

PROBE_SEED = 20_190_523


class Heads(BaseModel):
    """The heads that are left of one attention module.

    Attributes:
        query_heads: Ids of its query heads, in order; ids are those of the model before any cut.
        kv_heads: Ids of its KV heads.
        group_sizes: Query heads of every KV head; None where these are equal.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    query_heads: tuple[Count, ...]
    kv_heads: tuple[Count, ...]
    group_sizes: tuple[Count, ...] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Heads:
        check_heads(self.as_json())
        return self

    @model_serializer
    def as_json(self) -> dict[str, list[int]]:
        """The entry of the layout."""
        entry = {"query_heads": list(self.query_heads), "kv_heads": list(self.kv_heads)}
        return entry if self.group_sizes is None else {**entry, "group_sizes": [*self.group_sizes]}


class Description(BaseModel):
    """What ``config.headprune`` says of an uneven model.

    Attributes:
        schema_version: The latest that the runtime reads.
        family: The row of the model's family, as the runtime takes it.
        layout: Per attention module, the heads that are left.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1]
    family: dict[str, Any]
    layout: dict[str, Heads]


class Proof(BaseModel):
    """What a proof measured; differences are relative to the largest output.

    Attributes:
        gated_vs_cut: Gated original against the cut model in memory.
        gated_vs_reloaded: Gated original against the cut model read back from disk.
        largest_output: Largest absolute output of the gated original.
        control: Gated original against itself with every gate shifted by one head or, where that
            changes nothing, without the first head of every module; None where no heads are left.
        rounding: Gated original against itself with every gate moved by one bit: how much the
            model amplifies rounding. None in older manifests.
        tolerance: What the differences were held to.
        dtype: Element type that the models ran in.
        cast: The model as it was worked out against the one whose weights are rounded to what is
            stored of them: what writing it in half precision costs. The gated original above is
            that with rounded weights.
        probes: The outputs compared, by name.
        seed: Seed of the probe inputs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    gated_vs_cut: float
    gated_vs_reloaded: float
    largest_output: float
    control: float | None
    rounding: float | None = None
    tolerance: float
    dtype: Literal["float64", "float32", "bfloat16", "float16"]
    cast: float = 0.0
    probes: tuple[str, ...]
    seed: Count = PROBE_SEED

    @property
    def passed(self) -> bool:
        """Whether both differences are within the tolerance; NaN is not."""
        return all(d <= self.tolerance for d in (self.gated_vs_cut, self.gated_vs_reloaded))


class StoredOutput(BaseModel):
    """What is kept of one output.

    Attributes:
        size: How many values it has.
        largest: The largest absolute one.
        positions: Positions in the flat output.
        values: The values there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: Annotated[int, Field(gt=0, strict=True)]
    largest: Difference
    positions: Annotated[tuple[Count, ...], Field(min_length=1)]
    values: tuple[Finite, ...]

    @model_validator(mode="after")
    def _consistent(self) -> StoredOutput:
        if len(self.positions) != len(self.values):
            raise ValueError(f"{len(self.values)} values for {len(self.positions)} positions")
        if max(self.positions) >= self.size:
            raise ValueError(f"position {max(self.positions)} of an output of {self.size} values")
        return self


class Sample(BaseModel):
    """What is kept of the gated original's outputs, so that a result can be proven years later.

    Attributes:
        inputs_sha256: Digest of the probe inputs, which are made anew from the seed.
        outputs: By name.
        seed: Seed of the inputs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs_sha256: Digest
    outputs: Annotated[dict[str, StoredOutput], Field(min_length=1)]
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = PROBE_SEED


class Recorded(BaseModel):
    """What loading a result asks of headprune.json; the rest is for ``checkpoint.manifest``.

    Attributes:
        files: SHA-256 of every other file of the folder, but for the model card.
        layout: Per attention module, the heads that are left; empty in older ones.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: Literal[1] = 1
    files: dict[str, Digest]
    layout: dict[str, Heads] = {}

    @field_validator("files")
    @classmethod
    def _inside(cls, files: dict[str, str]) -> dict[str, str]:
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or "\0" in name or name == MANIFEST:
                raise ValueError(f"'{name}' is no file that it can vouch for")
        return files
