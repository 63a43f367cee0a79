"""make demo, on a tiny stand-in for its model: every step, and the files it promises."""

import gzip
import itertools
import json
import math
import runpy
from pathlib import Path

import pytest
import torch
from rich.console import Console

import headprune as package
from headprune import terminal
from headprune.compression import selection
from tests import tiny
from tests.test_cli import run

DEMO = Path(__file__).parents[1] / "scripts" / "demo"
SMALLER = {"seq_len=256": "seq_len=16", "12": "6"}
FITTING = {
    "seq_len: 256": "seq_len: 16",
    "recovery >= 75 %": "recovery >= 50 %",  # of a model that has learned nothing
}


@pytest.fixture
def demo(tmp_path, monkeypatch):
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

    monkeypatch.setattr(terminal, "bar", terminal.bar)  # the demo has its own
    command = names["headprune"]

    def headprune(job, *arguments):
        words = [SMALLER.get(str(word), str(word)) for word in arguments]
        if words[0] == "check" and not (tmp_path / "baseline.json").exists():
            command(job, *words, "--update-baseline")
        command(job, *words)

    own = names["main"].__globals__
    own |= {
        "headprune": headprune,
        "HERE": tmp_path,
        "SHIPPED": tmp_path,
        "fetch": lambda name, dtype: tmp_path / "model",
    }
    own["console"] = Console(width=120, force_terminal=False)
    return names


def test_the_demo_runs(demo, tmp_path, capsys):
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
    assert run(capsys, *command.split()[1:])[0] == 0
    assert (tmp_path / "small-vllm" / "export.json").exists()


def jobs(expected):
    """A job of the demo, and its clock."""
    now = [0.0]
    return runpy.run_path(str(DEMO / "demo.py"))["Job"](expected, lambda: now[0]), now


@pytest.mark.parametrize("pace", [0.1, 1.0, 20.0])
def test_the_bar_always_moves_and_never_back(pace):
    job, now = jobs(100.0)
    reached, shares = [0.0], type(job).begin.__globals__["SHARES"]
    assert math.isclose(sum(shares.values()), 1.0)
    for command, share in shares.items():
        job.begin(command)
        for _ in range(40):
            now[0] += share * 100 * pace / 40
            reached.append(job.done())
    assert all(before < after < 1 for before, after in itertools.pairwise(reached))
    assert reached[-1] > 0.99
    if pace == 1:  # as expected, it is a clock
        assert math.isclose(reached[20], 0.5 * shares["compress"], rel_tol=0.01)


def test_the_time_left_follows_the_pace():
    job, now = jobs(600.0)
    job.begin("compress")
    assert job.left() == "about 10 minutes left"
    now[0] = 100.0
    job.part(1, 2)  # half of the command, so 200 of some 256 seconds
    assert job.left() == "about 3 minutes left"
    now[0] = 500.0
    job.begin("check")
    assert job.left() == "about a minute left"
    now[0] = 524.0
    job.begin("report")
    assert job.left() == "some seconds left"


def test_an_interrupted_demo_leaves_nothing(demo, tmp_path, monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(selection.Selection, "add", interrupted)
    with pytest.raises(SystemExit, match="130"):
        demo["main"]()
    assert not (tmp_path / "demo-results").exists()
    said = capsys.readouterr()
    assert "make demo starts again" in said.out and "--resume" not in said.err


def test_the_stored_baseline_is_of_the_demo():
    stored = json.loads((DEMO / "baseline.json").read_text())
    assert stored["settings"]["seq_len"] == 256 and stored["structure"]["kv_heads"] == 68
    assert {"perplexity"} <= set(stored["metrics"])


@pytest.mark.slow
def test_a_broken_limit_ends_the_demo(demo, tmp_path):
    settings = tmp_path / "headprune.yaml"
    settings.write_text(settings.read_text().replace("token <= 76 %", "token <= 7 %"))
    with pytest.raises(SystemExit, match="1"):
        demo["main"]()
    assert not (tmp_path / "demo-results" / "report.html").exists()
