"""What is printed as the next command runs as it is printed, with the settings that were used."""

import json
import shlex
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from headprune.config import Dtype
from headprune.io.shell import command
from tests import tiny
from tests.dying import write
from tests.test_cli import run, succeeds

SMALL = ["--config", "seq_len=16", "--config", "calibration_tokens=512"]
TRAIN = ["--steps", "2", "--config", "batch_size=2", "--config", "seq_len=16"]
TRAIN += ["--target-heads", "0.5"]


def test_a_command_is_quoted_as_a_shell_needs_it():
    line = command(
        "prune", "a b", keep=0.5, refit=None, overwrite=False, resume=True,
        attention=("self", "cross"), dtype=Dtype.FLOAT32, out=Path("c $d")
    )  # fmt: skip
    assert line == (
        "headprune prune 'a b' --keep 0.5 --resume --attention self --attention cross "
        "--dtype float32 --out 'c $d'"
    )


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A working folder with a space in its name, a text in it."""
    folder = tmp_path / "my models"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "some text.txt").write_text(tiny.text(2_000))
    return folder


def printed(text):
    """The command below "Next:", as a shell reads it."""
    (line,) = (line for line in text.splitlines() if line.startswith("  headprune "))
    return shlex.split(line)[1:]


def ran(capsys, *words):
    return succeeds(capsys, *words)


def manifest(folder):
    return json.loads((Path(folder) / "headprune.json").read_text())


def following(capsys, *words):
    """Runs a command, then what it prints; returns that, and the manifest it leads to."""
    after = printed(ran(capsys, *words))
    ran(capsys, *after)
    return after, manifest(after[2])


# case -> the options of score, and those that the next command must have for it
SCORED = {
    "llama-gqa single heads": (["--unit", "head"], ["--layout", "ragged"]),
    "llama-gqa": ([], []),
    "llama-mqa": (["--config", "dtype=float64"], ["--config", "dtype=float64"]),
    "bert-mlm": (["--criterion", "magnitude"], []),
    "t5": (["--criterion", "fisher", "--config", "text_column=de,en"], ["text_column=de,en"]),
}


@pytest.mark.parametrize("case", SCORED)
def test_score_then_prune(case, home, capsys):
    options, wanted = SCORED[case]
    name, data = case.split()[0], "some text.txt"
    tiny.save(tiny.model(name), home / "a model")
    if name == "t5":
        data = "pairs.jsonl"
        rows = [{"de": tiny.text(16, i), "en": tiny.text(16, i + 90)} for i in range(64)]
        Path(data).write_text("\n".join(map(json.dumps, rows)))
    base = ["score", "a model", "--data", data, "its scores", *SMALL]
    after, made = following(capsys, *base, *options)
    assert " ".join(wanted) in " ".join(after)
    if "magnitude" in options:
        assert "--refit" not in after
    else:
        assert made["refit"]["data"] == data
        assert "seq_len=16" in after
        assert (
            made["refit"]["tokens"]
            == json.loads(Path("its scores/scores.json").read_text())["tokens"]
        )
    assert made["query_heads"][1] < made["query_heads"][0]
    again = printed(ran(capsys, *base, *options, "--overwrite"))
    assert again[2] == "its scores-pruned-2"  # the first is still there


@pytest.mark.parametrize("criterion", ["compensated", "fisher"])
def test_a_cut_without_the_refit_that_its_scores_assume_warns(criterion, home, capsys):
    tiny.save(tiny.model("llama-mha"), home / "model")
    base = ["--data", "some text.txt", "--criterion", criterion, "scores", *SMALL]
    after = printed(ran(capsys, "score", "model", *base))
    of_refit = {"--refit", "--config"}
    pairs = zip(["", *after], after, strict=False)
    bare = [word for before, word in pairs if not {before, word} & of_refit]
    bare += ["--refit", "none", "--overwrite", "--json"]
    warned = criterion != "fisher"
    _, out, err = run(capsys, *bare)
    said = json.loads(out)["warnings"]
    assert len(said) == warned == (f"warning: {criterion} scores assume that W_O" in err)
    whole = ["Nothing was removed or merged: the result has all heads of its source."]
    for fine, said in ([*bare, "--keep", "1.0"], whole), ([*after, "--overwrite", "--json"], []):
        _, out, err = run(capsys, *fine)
        assert (json.loads(out)["warnings"], "warning" in err) == (said, bool(said))
    plan = ["prune", "model", "--scores", "scores", "--keep", "0.5", "--dry-run"]
    plan += ["--save-plan", "plan.json"]
    assert ("cut with --refit DATA" in " ".join(run(capsys, *plan)[2].split())) == warned


def test_plan_then_prune(home, capsys):
    tiny.save(tiny.model("llama-gqa"), home / "a model")
    base = ["--data", "some text.txt", "scores", "--config", "dtype=float64", *SMALL]
    ran(capsys, "score", "a model", "--unit", "head", *base)
    plan = ["prune", "a model", "--scores", "scores", "--keep", "0.5", "--dry-run"]
    plan += ["--save-plan", "the plan.json", "--config", "out_dtype=bfloat16"]
    code, _, err = run(capsys, *plan)
    assert (code, "--layout ragged" in err) == (2, True)
    plan += ["--layout", "ragged"]
    after, made = following(capsys, *plan)
    assert "ragged" in after and "out_dtype=bfloat16" in after
    assert made["refit"]["data"] == "some text.txt"


@pytest.mark.parametrize("case", ["llama-gqa --unit head", "bert-mlm"])
def test_train_gates_then_prune(case, home, capsys):
    name, *options = case.split()
    tiny.save(tiny.model(name), home / "a model")
    base = ["train-gates", "a model", "--data", "some text.txt", "the gates", *TRAIN]
    after, made = following(capsys, *base, *options, "--config", "dtype=float64")
    assert ("ragged" in after) == bool(options)
    assert made["query_heads"][1] == made["query_heads"][0] // 2


ACCESS = ["--trust-remote-code", "--device", "cpu"]
LAYERS = ["--config", "placement=layers"]


def test_what_a_model_needs_stays_with_every_next_command(home, capsys):
    tiny.save(tiny.model("llama-gqa"), home / "model")
    text = ["--data", "some text.txt"]
    after = printed(ran(capsys, "train-gates", "model", *text, "gates", *TRAIN, *ACCESS))
    assert [word for word in ACCESS if word in after] == ACCESS
    score = ["score", "model", *text, "scores", *SMALL, "--criterion", "fisher"]
    after = printed(ran(capsys, *score, *ACCESS, *LAYERS))
    assert [word for word in ACCESS if word in after] == ACCESS and LAYERS[1] in after
    plan = ["prune", "model", "--scores", "scores", "--max-params", "80000", "--dry-run"]
    own = ["--for", "llama.cpp", "--config", "out_dtype=bfloat16", "--refit", "none"]
    after = printed(ran(capsys, *plan, *own, "--save-plan", "plan.json", *ACCESS, *LAYERS))
    for word in (*ACCESS, LAYERS[1], *own):
        assert word in after
    assert not {"--max-params", "--dry-run", "--save-plan", "seq_len=16"} & {*after}
    out = ran(capsys, *after)
    (line,) = (line for line in out.splitlines() if line.startswith("  headprune evaluate"))
    evaluate = shlex.split(line)[1:]
    assert [word for word in ACCESS if word in evaluate] == ACCESS and LAYERS[1] in evaluate
    evaluate[evaluate.index("TEXT")] = "some text.txt"
    ran(capsys, *evaluate, "--no-speed", "--seq-len", "16", "--config", "passage_words=0")


@contextmanager
def stopped():
    event = threading.Event()
    event.set()
    yield event


def test_a_healing_that_was_stopped_goes_on_as_printed(home, monkeypatch, capsys):
    tiny.save(tiny.model("llama-gqa"), home / "a model")
    rows = [{"body": tiny.text(40, i)} for i in range(60)]
    Path("text.jsonl").write_text("\n".join(map(json.dumps, rows)))
    healing = ["--config", "seq_len=24", "--config", "learning_rate=0.001"]
    healing += ["--config", "text_column=body", "out", "--overwrite", "--config", "bf16=false"]
    start = ["convert-gqa", "a model", "--kv-heads", "1", "--calibrate", "text.jsonl"]
    start += ["--heal", "3"]
    write(Path("out"), 1)  # --overwrite is needed again
    with monkeypatch.context() as patched:
        patched.setattr("headprune.distillation.heal.stop_on_interrupt", stopped)
        code, _, err = run(capsys, *start, *healing)
    assert code == 130, err
    (line,) = (part for part in err.split("Continue with: ") if part.startswith("headprune heal"))
    settings = yaml.safe_load(Path("out-checkpoints/config.yaml").read_text())
    ran(capsys, *shlex.split(line)[1:])
    assert manifest("out")["done"]["steps"] == 3 == settings["heal"]["steps"]
    assert not Path("out-checkpoints").exists()


def test_gates_that_were_stopped_go_on_as_printed(home, monkeypatch, capsys):
    tiny.save(tiny.model("llama-gqa"), home / "a model")
    start = ["train-gates", "a model", "--data", "some text.txt", "gates", *TRAIN]
    with monkeypatch.context() as patched:
        patched.setattr("headprune.gates.train_gates.stop_on_interrupt", stopped)
        code, _, err = run(capsys, *start)
    assert (code, "Continue with the same command and --resume." in err) == (130, True), err
    ran(capsys, *start, "--resume")
