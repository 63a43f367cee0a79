"""sweep.json and points/*.json: what a sweep measured."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from headprune.config import Amount, Count
from headprune.schemas.values import Digest

SWEEP = "sweep.json"


class Point(BaseModel):
    """One cut of the model, measured.

    Attributes:
        name: Its name, of criterion, share and refit.
        measured: Id of the model that was measured; None where its files are not at hand.
        task: The task of the model.
        criterion: What chose the heads; empty for the whole model.
        keep: Share of heads that was asked for.
        refit: Whether W_O made up for the heads that went.
        query_heads: Query heads that stay.
        kv_heads: KV heads that stay.
        parameters: Parameters that stay.
        quality: The main metric of the task.
        metrics: All metrics.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    name: str
    measured: Digest | None = None
    task: str
    criterion: str
    keep: Annotated[float, Field(ge=0, le=1)]
    refit: bool
    query_heads: Amount
    kv_heads: Amount
    parameters: Count
    quality: float
    metrics: Annotated[dict[str, float], Field(min_length=1)]


class Sweep(BaseModel):
    """A finished sweep.

    Attributes:
        metric: The metric that ``quality`` is.
        higher_is_better: Its direction.
        base: The whole model.
        points: All cuts, in the order of criteria and shares.
        front: Names of the cuts that no other beats in both size and quality.
        scores: Id of the scores that chose the heads.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    metric: str
    higher_is_better: bool
    base: Point
    points: Annotated[tuple[Point, ...], Field(min_length=1)]
    front: tuple[str, ...]
    scores: Digest
