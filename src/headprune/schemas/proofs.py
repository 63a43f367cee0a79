"""Measurements of a proof, and its stored part for a later proof."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from headprune.schemas.values import Count, Difference, Digest, Finite, Record

PROBE_SEED = 20_190_523


class Proof(Record):
    """Measurements of a proof; differences are relative to the largest output.

    Attributes:
        gated_vs_reloaded: Gated original against the cut model read back from disk.
        control: Gated original against itself with every gate shifted by one head. Where that
            changes nothing: without the first head of every module. None without heads.
        rounding: Gated original against itself with every gate moved by one bit.
        tolerance: Limit of the differences.
        dtype: Element type that the models ran in.
        cast: Cost of half precision: the model as computed against the one with rounded
            weights. The latter is the gated original above.
        probes: The outputs compared, by name.
        unreached: Parts of the model that no probe reached, in words.
        windows: Gated original against itself with wrong windows, by their mistake.
        seed: Seed of the probe inputs.
    """

    gated_vs_reloaded: float
    control: float | None
    rounding: float
    tolerance: float
    dtype: Literal["float64", "float32", "bfloat16", "float16"]
    cast: float
    probes: tuple[str, ...]
    unreached: tuple[str, ...] = ()
    windows: dict[str, Difference] = Field({})
    seed: Count = PROBE_SEED

    @property
    def passed(self) -> bool:
        """True if the difference is within the tolerance; NaN is not."""
        return self.gated_vs_reloaded <= self.tolerance


class TensorProof(Record):
    """Result of a comparison of tensors, a part of every proof.

    Every tensor, read back, equalled to the bit the original's kept slices times their gates.

    Attributes:
        tensors: Number of compared tensors.
        cut: Number of tensors that lost heads.
        bytes: Their size on disk.
    """

    tensors: Count
    cut: Count
    bytes: Count


class StoredOutput(Record):
    """The stored part of one output.

    Attributes:
        size: Number of values.
        largest: The largest absolute one.
        positions: Positions in the flat output.
        values: The values there.
    """

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


class Sample(Record):
    """Samples of the gated original's outputs, to prove a result again later.

    Attributes:
        inputs_sha256: Digest of the probe inputs, made anew from the seed.
        outputs: By name.
        positions: Length of the text beyond windows and the like; 0 without one.
        seed: Seed of the inputs.
    """

    inputs_sha256: Digest
    outputs: Annotated[dict[str, StoredOutput], Field(min_length=1)]
    positions: Count = 0
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = PROBE_SEED
