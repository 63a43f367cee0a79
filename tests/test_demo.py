"""make demo, on a tiny stand-in for its model: every step, and the files it promises."""

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
from headprune.evidence import windows
from tests import tiny
from tests.test_cli import run

DEMO = Path(__file__).parents[1] / "scripts" / "demo"
CONTEXT = 96
FITTING = {
    "seq_len: 512": "seq_len: 16",
    "windows: 12": "windows: 24",
    "recovery >= 95 %": "recovery >= 50 %",  # of a model that has learned nothing
}


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """The script's names, with smaller numbers, in a folder of its own and in this process."""
    monkeypatch.chdir(tmp_path)
    small = tiny.model("llama-gqa", num_hidden_layers=4, attention_bias=False)
    tiny.save(small, tmp_path / "model")
    for name in ("train.txt", "test.txt"):
        (tmp_path / name).write_text(tiny.text(3_000))
    settings = (DEMO / "headprune.yaml").read_text()
    for theirs, ours in FITTING.items():
        assert settings.count(theirs) == 1
        settings = settings.replace(theirs, ours)
    (tmp_path / "headprune.yaml").write_text(settings)
    names = runpy.run_path(str(DEMO / "demo.py"))

    monkeypatch.setattr(terminal, "bar", terminal.bar)  # the demo has its own
    own = names["main"].__globals__
    own |= {
        "CONTEXT": CONTEXT,
        "HERE": tmp_path,
        "NOVEL": tmp_path / "test.txt",
        "fetch": lambda name, dtype: tmp_path / "model",
    }
    own["console"] = Console(width=120, force_terminal=False)
    return names


def test_the_demo_runs(demo, tmp_path, capsys):
    demo["main"]()
    told = capsys.readouterr().out
    results = tmp_path / "demo-results"
    report = json.loads((results / "half" / "report.json").read_text())
    after, before = (report[side]["cost"]["kv_cache_bytes"] for side in ("model", "against"))
    assert 0.3 < after / before < 0.5  # of the positions, which are more than the context
    table = told.partition("before and after")[2]
    assert f"{report['model']['metrics'][0]['value']:,.2f}" in table
    assert "On this machine the rest takes about" in told
    assert "smollm2-small" in (results / "report.html").read_text()
    # what it says last works as it stands
    load, command = (line.split(":", 1)[1].strip() for line in told.splitlines()[-2:])
    assert isinstance(eval(load, {"headprune": package}), torch.nn.Module)
    code, _, said = run(capsys, *command.split()[1:])
    assert code == 0, said
    assert "auto_map" not in json.loads((tmp_path / "small-anywhere" / "config.json").read_text())


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
        assert math.isclose(reached[20], 0.5 * shares["convert-swa"], rel_tol=0.01)


def test_the_time_left_follows_the_pace():
    job, now = jobs(600.0)
    job.begin("convert-swa")
    assert job.left() == "about 10 minutes left"
    now[0] = 100.0
    job.part(1, 2)  # half of the command, so 200 of some 256 seconds
    assert job.left() == "about 8 minutes left"
    now[0] = 500.0
    job.begin("check")
    assert job.left() == "about a minute left"
    now[0] = 524.0
    job.begin("report")
    now[0] = 540.0
    assert job.left() == "some seconds left"


def test_an_interrupted_demo_leaves_nothing(demo, tmp_path, monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(windows, "slopes", interrupted)
    with pytest.raises(SystemExit, match="130"):
        demo["main"]()
    assert not (tmp_path / "demo-results").exists()
    said = capsys.readouterr()
    assert "make demo starts again" in said.out and "--resume" not in said.err


@pytest.mark.slow
def test_a_broken_limit_ends_the_demo(demo, tmp_path):
    settings = tmp_path / "headprune.yaml"
    settings.write_text(settings.read_text().replace("<= 50 %", "<= 5 %"))
    with pytest.raises(SystemExit, match="1"):
        demo["main"]()
    assert not (tmp_path / "demo-results" / "report.html").exists()
