"""Trainings: the history.jsonl of gates and the heal.jsonl of a result, thinned to be drawn."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from headprune.errors import CheckpointError
from headprune.report.view import History

POINTS = 250  # of a drawn history; a line has no room for more


def _records(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines if line.strip()]
        for record in records:
            float(record["loss"]), int(record["step"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"The history '{path}' is damaged: {error}.") from None
    return records


def frames(path: Path, units: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The snapshots of all gates in a history."""
    snapshots = [(r["step"], r.get("open_percent")) for r in _records(path)]
    return tuple((step, tuple(p)) for step, p in snapshots if p and len(p) == units)


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
        (float(now["step"]), "heads chosen" if now.get("settled") else "next round")
        for before, now in pairwise(records)
        if bool(before.get("settled")) is not bool(now.get("settled"))
    ]
    targets = [r["target_heads"] for r in last if r.get("target_heads") is not None]
    return History(
        kind=kind,
        steps=tuple(int(r["step"]) for r in last),
        loss=tuple(fmean(float(r["loss"]) for r in bucket) for bucket in buckets),
        expected=tuple(float(r["expected_heads"]) for r in last if "expected_heads" in r),
        target=tuple(targets) if len(targets) == len(last) else (),
        phases=tuple(phases),
        records=len(records),
    )
