"""What the records of commands say of them: that of a result, and those of the steps before it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from headprune.config import Amount
from headprune.parsing import validated
from headprune.plan import ModelIdentity

BeforeAfter = tuple[Amount, Amount]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # a report does not show all of it


class Left(_Record):
    """Ids of the query heads that are left of one attention module."""

    query_heads: tuple[Amount, ...]


class Sharing(_Record):
    """How KV heads were merged."""

    merge: str
    grouping: str
    calibration_tokens: Amount | None = None


class Healing(_Record):
    """How a model was trained to match another; the divergence before and after."""

    steps: Amount
    teacher: str
    before: float | None = None
    after: float | None = None


class Differences(_Record):
    """What a proof measured."""

    gated_vs_cut: float
    gated_vs_reloaded: float


class Made(_Record):
    """What one command made.

    Attributes:
        created: UTC time.
        source: The model that it began with.
        query_heads: Query heads before and after.
        kv_heads: KV heads before and after.
        parameters: Parameters before and after.
        layout: Per attention module, the heads that are left.
        sharing: How KV heads were merged, if they were.
        healing: How it was trained to match another model, if it was.
        proof: What the proof measured.
    """

    schema_version: Literal[1] = 1
    created: str
    source: ModelIdentity
    query_heads: BeforeAfter
    kv_heads: BeforeAfter
    parameters: BeforeAfter
    layout: dict[str, Left] = {}
    sharing: Sharing | None = None
    healing: Healing | None = None
    proof: Differences

    @property
    def key(self) -> tuple[object, ...]:
        """Tells records apart; times alone do not, as small models take less than a second."""
        proof = (self.proof.gated_vs_reloaded, self.proof.gated_vs_cut)
        return (self.created, self.source.fingerprint, self.parameters, *proof)


def made(record: Mapping[str, Any], path: Path) -> Made:
    """The record of one command.

    Raises:
        CheckpointError: If a report could not show it.
    """
    return validated(Made, dict(record), path)
