"""The benchmark of GPUs runs without one, and the docs hold what it wrote and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """scripts/bench_gpu.py as a module."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import bench_gpu

    return bench_gpu


@pytest.mark.slow
def test_every_measurement_is_made(bench: Any, tmp_path: Path) -> None:
    bench.main(["tiny"], 10.0, tmp_path / "gpu.md")
    page = (tmp_path / "gpu.md").read_text()
    rows = re.findall(r"^\| (\S.*?) \| (\S*) \| (.*?) \| (.*) \|$", page, re.MULTILINE)
    assert page.startswith(bench.TOP)
    assert len(rows) == 21
    for what, seconds, peak, note in rows:
        assert seconds or note, what
        assert not peak, what  # a CPU says none
        assert "failed" not in note and "out of" not in note, (what, note)
    assert len({what for what, *_ in rows}) == len(rows)


def test_what_does_not_come_to_pass_is_told(bench: Any) -> None:
    import torch

    def full() -> None:
        raise torch.OutOfMemoryError("no room")

    def broken() -> None:
        raise ValueError("why\nmore")

    table = bench.Table("tiny", float("inf"), torch.device("cpu"))
    assert table.measure("fits", lambda: "well") is not None
    assert table.measure("full", full) is None
    assert table.measure("broken", broken) is None
    late = bench.Table("tiny", 0.0, torch.device("cpu"))
    assert late.measure("late", broken) is None
    assert table.rows[0].endswith("|  | well |")
    assert table.rows[1:] == [
        "| full |  |  | out of memory |",
        "| broken |  |  | failed: ValueError: why |",
    ]
    assert late.rows == ["| late |  |  | not begun: out of time |"]


def test_the_page_is_what_the_script_wrote(bench: Any) -> None:
    page = (ROOT / "docs" / "benchmarks" / "gpu.md").read_text()
    assert page == bench.page([], "") or re.match(r"NVIDIA .*, torch 2", page[len(bench.TOP) :])
    assert page.startswith(bench.TOP)
