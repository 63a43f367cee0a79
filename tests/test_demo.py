"""The demo says how long the whole of it takes."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "scripts" / "demo" / "demo.py"


@pytest.fixture(scope="module")
def time_left() -> Callable[[str, float, float], str]:
    """The function of the demo."""
    found: Callable[[str, float, float], str] = runpy.run_path(str(DEMO))["time_left"]
    return found


@pytest.mark.parametrize(
    ("command", "elapsed", "said"),
    [
        ("compress", 0.0, "Step 1 of 4; about 5 minutes left for all of it."),
        ("evaluate", 216.0, "Step 2 of 4; about a minute left for all of it."),
        ("evaluate", 720.0, "Step 2 of 4; about 5 minutes left for all of it."),  # a slow machine
        ("report", 294.0, "Step 4 of 4; about some seconds left for all of it."),
    ],
)
def test_the_time_left_follows_the_pace(
    command: str, elapsed: float, said: str, time_left: Callable[[str, float, float], str]
) -> None:
    assert time_left(command, elapsed, 300.0) == said
