"""Trainings: the history.jsonl of gates and the heal.jsonl of a result, thinned to be drawn."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from headprune.errors import CheckpointError
from headprune.io.parsing import first_problem, read_json_lines
from headprune.reports.view import History

POINTS = 250  # of a drawn history; a line has no room for more


class _Record(BaseModel):
    """One step of a training."""

    model_config = ConfigDict(frozen=True, extra="ignore")  # a report does not show all of it

    step: Annotated[int, Field(ge=0, le=2**53)]  # which a browser's numbers reach to
    loss: float
    expected_heads: float | None = None
    target_heads: float | None = None
    settled: bool = False


_RECORDS = TypeAdapter(tuple[_Record, ...])


def _records(path: Path) -> tuple[_Record, ...]:
    if not path.is_file():
        return ()
    try:
        return _RECORDS.validate_python(read_json_lines(path))
    except ValidationError as problem:
        raise CheckpointError(
            f"The history '{path}' is damaged: {first_problem(problem)}."
        ) from None


def history(path: Path, kind: Literal["gates", "heal"]) -> History | None:
    """A history in as many points as can be told apart; None where there is no file.

    Raises:
        CheckpointError: If it is damaged.
    """
    records = _records(path)
    if not records:
        return None
    width = -(-len(records) // POINTS)
    buckets = [records[at : at + width] for at in range(0, len(records), width)]
    last = [bucket[-1] for bucket in buckets]
    phases = [
        (float(now.step), "heads chosen" if now.settled else "next round")
        for before, now in pairwise(records)
        if before.settled is not now.settled
    ]
    expected = [r.expected_heads for r in last if r.expected_heads is not None]
    targets = [r.target_heads for r in last if r.target_heads is not None]
    return History(
        kind=kind,
        steps=tuple(r.step for r in last),
        loss=tuple(fmean(r.loss for r in bucket) for bucket in buckets),
        expected=tuple(expected) if len(expected) == len(last) else (),
        target=tuple(targets) if len(targets) == len(last) else (),
        phases=tuple(phases),
        records=len(records),
    )
