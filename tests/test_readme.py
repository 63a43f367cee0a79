"""Every command and the Python example of the README run, on tiny stand-ins for the models."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from headprune.cli import app as cli
from tests import tiny

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
MODELS = {
    "HuggingFaceTB/SmolLM2-135M": "llama-gqa",
    "meta-llama/Llama-3.2-1B": "llama-gqa",
    "Helsinki-NLP/opus-mt-de-en": "marian",
}
RECIPE_STEPS = ("train-gates", "evaluate", "check")  # of the recipe that init writes there
SMALL = ["--steps", "3", "--batch-size", "2", "--seq-len", "16"]


def commands() -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("headprune ")]


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder in which the README's names mean tiny models and texts."""
    monkeypatch.chdir(tmp_path)
    for name, case in MODELS.items():
        tiny.save(tiny.model(case), tmp_path / name)
    rows = ["de\ten", *(f"{tiny.text(9, i)}\t{tiny.text(8, i)}" for i in range(12))]
    for name in ("pairs.tsv", "test.tsv"):
        (tmp_path / name).write_text("\n".join(rows))
    for name in ("text.txt", "test.txt", "hub.txt"):
        (tmp_path / name).write_text(tiny.text(2_000))
    (check,) = re.findall(r"```yaml\n# headprune.yaml\n(.*?)```", README, re.DOTALL)
    # a layer without heads keeps its length in the cache, which in a tiny model is a share of it
    check = check.replace("seq_len: 256", "seq_len: 16").replace("token <= 75 %", "token <= 77 %")
    (tmp_path / "headprune.yaml").write_text(check)
    return tmp_path


@pytest.mark.slow
def test_every_command_runs(stand_ins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(commands()) >= 6
    for command in commands():
        shrunk = ["hub.txt" if word.startswith("wikitext:") else word for word in command]
        if "train-gates" in shrunk:
            shrunk += SMALL
        if "heal" in shrunk:
            shrunk[shrunk.index("--steps") + 1] = "3"
            shrunk += SMALL[2:]
        if "convert-gqa" in shrunk:
            shrunk += ["--seq-len", "16"]
        if shrunk[1] in ("score", "sweep") or (shrunk[1] == "prune" and "--refit" in shrunk):
            shrunk += ["--seq-len", "16", "--calibration-tokens", "256"]
        if "evaluate" in shrunk:
            shrunk += ["--seq-len", "16"]
        if shrunk[1] == "run":
            shrunk += [f"--set=steps.{step}.seq_len=16" for step in RECIPE_STEPS]
            shrunk += ["--set=steps.train-gates.steps=3", "--set=steps.train-gates.batch_size=2"]
        monkeypatch.setattr("sys.argv", shrunk)
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code, command
    assert (stand_ins / "report.json").exists()


def test_the_python_example_runs(stand_ins: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    shrunk = example.replace("steps=300", "steps=3, seq_len=16, batch_size=2")
    shrunk = shrunk.replace("EvaluateConfig()", "EvaluateConfig(seq_len=16)")
    assert shrunk.count("seq_len=16") == 2
    scope: dict[str, object] = {}
    exec(compile(shrunk, "README.md", "exec"), scope)
    assert type(scope["small"]).__name__ == "LlamaForCausalLM"


def test_every_command_of_the_table_exists() -> None:
    named = set(re.findall(r"\| `headprune ([a-z-]+)", README))
    assert named == {c.name or c.callback.__name__ for c in cli.app.registered_commands}


def test_the_table_of_families_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    table = README.partition("<!-- families")[2].partition("-->\n\n")[2]
    table = table.partition("\n\n<!-- end of families -->")[0]
    with pytest.raises(SystemExit):
        cli.app(["families", "--markdown"])
    assert capsys.readouterr().out.strip() == table
