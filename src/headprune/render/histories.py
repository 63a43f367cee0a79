"""Trainings: history.jsonl of gates and heal.jsonl of a result, thinned to be drawn."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from headprune.errors import CheckpointError
from headprune.io.parsing import first_problem, read_json_lines

POINTS = 250  # of a drawn history; a line has no room for more


class _Step(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # a report does not show all of it

    step: Annotated[int, Field(ge=0, le=2**53)]  # which a browser's numbers reach to
    loss: float
    expected_heads: float | None = None
    target_heads: float | None = None
    settled: bool = False


_STEPS = TypeAdapter(tuple[_Step, ...])


@dataclass(frozen=True)
class History:
    """A training, thinned to the points of a drawing."""

    kind: str  # "gates", or "heal" for a result
    points: tuple[_Step, ...]  # the last step of every bucket, with the mean loss of its steps
    phases: tuple[tuple[float, str], ...]  # where something began, and what
    steps: int  # in the file

    def column(self, name: str) -> list[float]:
        """Return a number of every point; empty where one lacks it."""
        values = [getattr(point, name) for point in self.points]
        return [] if None in values else values


def history(path: Path, kind: str) -> History | None:
    """Return a history; None where empty. Raise CheckpointError where damaged."""
    try:
        steps = _STEPS.validate_python(read_json_lines(path))
    except ValidationError as problem:
        why = first_problem(problem)
        raise CheckpointError(f"The history '{path}' is damaged: {why}.") from None
    if not steps:
        return None
    width = -(-len(steps) // POINTS)
    buckets = [steps[at : at + width] for at in range(0, len(steps), width)]
    points = [b[-1].model_copy(update={"loss": fmean(s.loss for s in b)}) for b in buckets]
    phases = [(float(b.step), "heads chosen") for a, b in pairwise(steps) if b.settled > a.settled]
    return History(kind, tuple(points), tuple(phases), len(steps))
