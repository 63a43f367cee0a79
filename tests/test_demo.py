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

import headprune as package
from headprune import app as cli
from tests import tiny

DEMO = Path(__file__).parents[1] / "scripts" / "demo"
SMALLER = {"seq_len=256": "seq_len=16", "12": "6"}
FITTING = {
    "seq_len: 256": "seq_len: 16",
    "recovery >= 75 %": "recovery >= 50 %",  # of a model that has learned nothing
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
        if words[0] == "check" and not (tmp_path / "baseline.json").exists():
            run([*words, "--update-baseline"])
        run(words)

    def run(words: list[str]) -> None:
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
    report = json.loads((results / "three-quarters" / "report.json").read_text())
    assert report["model"]["cost"]["kv_heads"] == 4
    table = told.partition("before and after")[2]
    assert f"{report['model']['metrics'][0]['value']:,.2f}" in table
    assert "On this machine the rest takes about" in told
    assert "three-quarters" in (results / "report.html").read_text()
    # what it says last works as it stands
    load, command = (line.split(":", 1)[1].strip() for line in told.splitlines()[-2:])
    assert isinstance(eval(load, {"headprune": package}), torch.nn.Module)
    demo["main"].__globals__["headprune"](*command.split()[1:])
    assert (tmp_path / "small-vllm" / "export.json").exists()


@pytest.mark.parametrize(
    ("command", "elapsed", "said"),
    [
        ("compress", 0.0, "Step 1 of 4."),
        ("evaluate", 216.0, "Step 2 of 4; about a minute left for all of it."),
        ("evaluate", 720.0, "Step 2 of 4; about 5 minutes left for all of it."),
        ("report", 294.0, "Step 4 of 4; about some seconds left for all of it."),
    ],
)
def test_the_time_left_follows_the_pace(command: str, elapsed: float, said: str) -> None:
    time_left = runpy.run_path(str(DEMO / "demo.py"))["time_left"]
    assert time_left(command, elapsed) == said


def test_the_stored_baseline_is_of_the_demo() -> None:
    stored = json.loads((DEMO / "baseline.json").read_text())
    assert stored["settings"]["seq_len"] == 256 and stored["structure"]["kv_heads"] == 68
    assert {"perplexity"} <= set(stored["metrics"])


@pytest.mark.slow
def test_a_broken_limit_ends_the_demo(demo: dict[str, Any], tmp_path: Path) -> None:
    settings = tmp_path / "headprune.yaml"
    settings.write_text(settings.read_text().replace("token <= 76 %", "token <= 7 %"))
    with pytest.raises(SystemExit, match="1"):
        demo["main"]()
    assert not (tmp_path / "demo-results" / "report.html").exists()
