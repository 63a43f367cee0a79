"""make demo, on a tiny stand-in for its model: every step, and the files it promises."""

from __future__ import annotations

import gzip
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from headprune import app as cli
from tests import tiny

DEMO = Path(__file__).parents[1] / "scripts" / "demo"
SMALLER = {"256": "16", "seq_len=256": "seq_len=16", "24": "6", "4096": "256", "3072": "64"}
FITTING = {
    "seq_len: 256": "seq_len: 16",
    "recovery >= 80 %": "recovery >= 50 %",  # of a model that has learned nothing
    "load_route == runtime": "load_route == native",  # of two layers that are cut alike
}


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The script's names, with smaller numbers, in a folder of its own and in this process."""
    monkeypatch.chdir(tmp_path)
    # ONNX takes its time over each layer
    small = tiny.model("llama-gqa", torch.bfloat16, num_hidden_layers=2)
    tiny.save(small, tmp_path / "model")
    for name in ("train.txt", "test.txt"):
        (tmp_path / name).write_text(tiny.text(3_000))
    for name in ("code", "documentation", "novel", "play", "reference"):
        with gzip.open(tmp_path / f"{name}.txt.gz", "wt") as file:
            file.write(tiny.text(2_000))
    settings = (DEMO / "headprune.yaml").read_text()
    for theirs, ours in FITTING.items():
        assert settings.count(theirs) == 1
        settings = settings.replace(theirs, ours)
    (tmp_path / "headprune.yaml").write_text(settings)
    names = runpy.run_path(str(DEMO / "demo.py"))

    def headprune(*arguments: object) -> None:
        words = [SMALLER.get(str(word), str(word)) for word in arguments]
        monkeypatch.setattr("sys.argv", ["headprune", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        if stop.value.code:
            raise stop.value

    own = names["main"].__globals__
    own |= {
        "headprune": headprune,
        "HERE": tmp_path,
        "SHIPPED": tmp_path,
        "fetch": lambda name, dtype: tmp_path / "model",
    }
    own["console"] = Console(width=120, force_terminal=False)
    return names


def test_the_demo_runs(
    demo: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo["main"]()
    told = capsys.readouterr().out
    results = tmp_path / "demo-results"
    cut, shared = (
        json.loads((results / name / "report.json").read_text())
        for name in ("three-quarters", "one-kv-head")
    )
    assert [report["model"]["cost"]["kv_heads"] for report in (cut, shared)] == [4, 2]
    table = told.partition("before and after")[2]
    for number in (cut["model"]["metrics"][0]["value"], shared["model"]["metrics"][0]["value"]):
        assert f"{number:,.2f}" in table
    torch_says, _, engine_says = told.partition("in torch:")[2].partition("and in ONNX Runtime:")
    assert (results / "smollm2-small-onnx" / "model.onnx").is_file()
    words = torch_says.split()
    assert len(words) > 3 and engine_says.split()[: len(words)] == words
    assert 'failures="0"' in (results / "check.xml").read_text()
    page = (results / "report.html").read_text()
    assert "three-quarters" in page and "one-kv-head" in page


@pytest.mark.slow
def test_a_broken_limit_ends_the_demo(demo: dict[str, Any], tmp_path: Path) -> None:
    settings = tmp_path / "headprune.yaml"
    settings.write_text(settings.read_text().replace("token <= 76 %", "token <= 7 %"))
    with pytest.raises(SystemExit, match="1"):
        demo["main"]()
    assert not (tmp_path / "demo-results" / "report.html").exists()
