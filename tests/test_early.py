"""Mistakes in options are found before a model is loaded: here there is none to load."""

import subprocess
import sys
from pathlib import Path

import pytest

from headprune.config import CalibrationConfig
from headprune.schemas.plan import ModelIdentity
from headprune.schemas.scores import Scores, ScoresMetadata, write_scores
from headprune.tensors.units import Unit
from tests import tiny
from tests.test_cli import run

DATA = "--data text.txt"
PLAN = "prune gone --dry-run --save-plan p --scores scores"
CUT = "prune gone out --scores scores --criterion fisher"
NO_FILE = "There is no file 'nope.txt'"
HEALED = "convert-gqa gone --kv-heads 1 out --calibrate text.txt --heal"
MISTAKES = {
    "prune gone out": "Give one of --gates (from train-gates)",
    "prune gone out --gates g --plan p": "Give one of --gates (from train-gates)",
    "prune gone --dry-run": "Give one of --gates (from train-gates)",
    f"{CUT} --gates g --max-params 9": "Give one of --gates (from train-gates)",
    f"{CUT} --plan plan.json --max-kv-bytes 9": "Give one of --gates (from train-gates)",
    f"{PLAN} --gates g --keep 0.5": "Give one of --gates (from train-gates)",
    f"{CUT} --keep 0.5 --roles r": "--roles has no effect without --keep-roles or --dry-run",
    "prune gone out --gates g --roles r --keep-roles x": "--keep-roles has no effect without --sc",
    "prune gone out --scores scores --keep 4": "hold 2 criteria",
    "prune gone out --scores scores --criterion fisher": "--scores needs a budget: --keep",
    "prune gone out --scores scores --criterion fischer --keep 4": "Did you mean 'fisher'",
    "prune gone out --scores scores --criterion fisher --keep 1.5": "between 0 and 1, not",
    "prune gone out --scores scores --criterion fisher --keep -2": "negative, and -2 is",
    "prune gone out --scores nope --keep 0.5": "'nope' is no scores folder",
    "prune gone out --gates nope": "'nope' is no gates folder",
    "prune gone out --plan plan.json --keep 0.5": "no effect without --scores or --gates",
    "prune gone out --plan plan.json --criterion x": "no effect without --scores:",
    "prune gone out --plan nope.json": "There is no plan file at 'nope.json'",
    "prune gone out --plan .": "'.' is a folder; give a file of JSON",
    "prune gone out --plan text.txt": "'text.txt' is not readable as JSON",
    "prune gone out --plan plan.json --refit nope.txt": NO_FILE,
    "prune gone out --plan plan.json --refit ./nope": "There is no file './nope'",
    f"score gone out {DATA} --criterion fischer": "Did you mean 'fisher'",
    f"score gone out {DATA} --config attention=encodr": "Did you mean 'encoder'",
    "score gone out --data nope.txt": NO_FILE,
    f"train-gates gone out {DATA} --target-heads 1.5": "between 0 and 1, not 1.5",
    f"train-gates gone out {DATA} --target-heads 0.5 --config attention=x": "no family has",
    "train-gates gone out --data nope.txt --target-heads 0.5": NO_FILE,
    "convert-gqa gone out --kv-heads 1 --merge meen": "Did you mean 'mean'",
    "convert-gqa gone out --kv-heads 1 --config attention=x": "no family has attention of that",
    "convert-gqa gone out --kv-heads 1 --calibrate nope.txt": NO_FILE,
    f"{HEALED} 0": "--heal: ",
    f"{HEALED} 3 --config learning_rate=0": "learning_rate: ",
    "heal gone --teacher gone out --steps 3 --data nope.txt": NO_FILE,
    f"heal model --teacher ./nope out --steps 3 {DATA}": "'./nope' is neither a folder",
    f"evaluate model {DATA} --against ./nope": "'./nope' is neither a folder",
    "evaluate gone --data nope.txt": NO_FILE,
    "inspect a/b": "'a/b': there is no such folder",
    "compress gone out --keep 0.5 --data nope.txt": NO_FILE,
    "compress gone out --keep 0.5 --for vlm": "--for: Input should be 'llama.cpp', 'vllm'",
    f"check gone {DATA} --limit perplexity<=+2%": "give --baseline FILE",
    "prune gone --dry-run --save-plan p --scores nope --keep 0.5": "'nope' is no scores folder",
    f"{PLAN} --keep 0.5": "2 criteria (fisher, magnitude)",
    f"{PLAN} --keep 0.5 --criterion x": "The scores have no criterion",
    f"{PLAN} --keep 1.5 --criterion fisher": "between 0 and 1, not 1.5",
    f"{PLAN} --max-params 9 --config keep_roles=x": "no effect without --roles",
    f"{PLAN.replace(' p ', ' plan.json ')} --keep 0.5": "'plan.json' already exists",
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A working folder with text, a plan and scores, and weights that nothing may load."""
    monkeypatch.chdir(tmp_path)
    Path("gone").mkdir()  # a place, and no model
    Path("text.txt").write_text(tiny.text(500))
    Path("plan.json").write_text("{}")
    tiny.save(tiny.model("llama-gqa"), Path("model"))
    scored = ModelIdentity(name="gone", model_type="llama", architecture="L", fingerprint="0")
    metadata = ScoresMetadata(
        created="", versions={}, model=scored, unit=Unit.HEAD, modules=("m",), heads=((0, 1),),
        group_sizes=((1, 1),), criteria={"fisher": "", "magnitude": ""}, data=None,
        calibration=CalibrationConfig(), tokens=0
    )  # fmt: skip
    values = tiny.torch.ones(2).double()
    write_scores(Path("scores"), Scores(metadata, {"fisher": values, "magnitude": values.clone()}))
    (Path("model") / "model.safetensors").write_bytes(b"")
    return tmp_path


@pytest.mark.process
@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("inspect('a/b')", "no such folder"),
        ("evaluate('.', data='t', against='a/b')", "no such folder"),
        ("score('.', 's', data='t.txt')", "There is no file 't.txt'"),
    ],
)
def test_a_wrong_name_ends_before_torch_is_imported(call, message, tmp_path):
    code = f"""
import sys, headprune
try:
    headprune.{call}
except headprune.errors.HeadpruneError as error:
    print(error, "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert message in done.stdout and done.stdout.endswith("False\n"), done.stderr


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_found_before_the_model(line, home, capsys):
    code, _, err = run(capsys, *line.split())
    assert code == 2, err
    assert MISTAKES[line] in err
    assert "loading" not in err and "gone'" not in err, err
    assert not Path("out").exists()
