"""Several processes train as one: the same batches, the same result, one folder."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from headprune import app as cli
from headprune import processes
from headprune.config import (
    ConvertConfig,
    DataConfig,
    HealConfig,
    HealObjective,
    HealOptimizer,
    TrainGatesConfig,
    Writing,
)
from headprune.distillation.heal import heal
from headprune.errors import HeadpruneError
from headprune.gates.train_gates import train_gates
from headprune.planning.choose import CutRequest
from headprune.result.convert_gqa import convert_gqa
from headprune.result.prune import prune
from headprune.result.verify import verify
from headprune.schemas.gates import read_metadata
from tests import forked, tiny

SETTINGS = {"steps": 6, "batch_size": 4, "seq_len": 16, "learning_rate": 5e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    tiny.save(tiny.model("llama-mha"), folder / "model")
    (folder / "text.txt").write_text(tiny.text(2_000))
    convert_gqa(folder / "model", folder / "gqa", ConvertConfig(kv_heads=2, merge="mean"))
    return folder


def full(command):
    others = [f"--config={k}={v}" for k, v in SETTINGS.items() if k != "learning_rate"]
    return [*command, "--data", "text.txt", *others]


def together(folder, *command):
    """Runs a command in two processes on the CPU."""
    return forked.together(2, *full(command), folder=folder)


def launched(folder, *command):
    """The same by torchrun, which starts them from nothing."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [sys.executable, *launcher, "-m", "headprune", *full(command)],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )


def furthest(folder, one, other):
    """The largest difference between the weights of two models."""
    a, b = (load_file(folder / name / "model.safetensors") for name in (one, other))
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "heal.jsonl").read_text().splitlines()]


@pytest.mark.process
def test_two_processes_heal_as_one_does(folder):
    # bfloat16 rounds by how large a batch is; Muon orthogonalises in it
    given = ("learning_rate=5e-3", "bf16=false", "optimizer=adamw")
    given = (*given, "objective=distill")  # the teacher of random weights has learnt no text
    alike = [word for each in given for word in ("--config", each)]
    done = together(folder, "heal", "gqa", "--teacher", "model", *alike, "--json", "two")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)  # once: JSON twice would not parse
    text = DataConfig(source=str(folder / "text.txt"))
    for name, seed in (("one", 0), ("other", 1)):
        alike_alone = {"optimizer": HealOptimizer.ADAMW, "objective": HealObjective.DISTILL}
        alone = HealConfig(**SETTINGS, seed=seed, bf16=False, **alike_alone)
        heal(folder / "gqa", folder / "model", text, folder / name, alone)

    assert furthest(folder, "one", "two") < 1e-5  # rounding, as Adam magnifies it
    torch.testing.assert_close(losses(folder / "one"), losses(folder / "two"), rtol=1e-5, atol=0)
    assert furthest(folder, "one", "other") > 1e-3  # other batches would show
    assert told["loss"]["after"] < told["loss"]["before"]
    assert told["manifest"]["proof"]["gated_vs_reloaded"] <= told["manifest"]["proof"]["tolerance"]
    assert verify(folder / "two").passed
    assert not list(folder.glob("two-*"))
    assert not list(folder.glob(".*partial"))


@pytest.mark.process
@pytest.mark.parametrize("start", [together, pytest.param(launched, marks=pytest.mark.slow)])
def test_two_processes_train_gates(start, folder):
    command = ("train-gates", "model", "--target-heads", "0.5", "gates")
    done = start(folder, *command, "--overwrite")
    assert done.returncode == 0, done.stderr
    assert len(re.findall("12 of 24 query heads stay", done.stdout)) == 1
    history = (folder / "gates" / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in history] == [1, 2, 3, 4, 5, 6]
    assert read_metadata(folder / "gates").kept_heads == 12
    assert not list(folder.glob("gates-*"))
    pruned = prune(
        folder / "model",
        folder / "pruned",
        CutRequest(gates=folder / "gates"),
        writing=Writing(overwrite=True),
    )
    assert pruned.plan.kept_heads == 12


@pytest.mark.process
def test_two_processes_choose_as_one_does(folder):
    """Gates that hardly move: both start from the same scores, and refit the same W_O."""
    how = ("--config", "gate_lr=1e-9", "--target-heads", "0.5")
    done = together(folder, "train-gates", "model", *how, "slow")
    assert done.returncode == 0, done.stderr
    text, shared = DataConfig(source=str(folder / "text.txt")), SETTINGS | {"target_heads": 0.5}
    del shared["learning_rate"]
    for name, rate in (("slow-one", 1e-9), ("slow-other", 0.5)):
        config = TrainGatesConfig(**shared, gate_lr=rate)
        train_gates(folder / "model", text, folder / name, config)
    names = ("slow", "slow-one", "slow-other")
    two, one, other = (load_file(folder / name / "gates.safetensors") for name in names)
    assert torch.equal(two["kept"], one["kept"])
    torch.testing.assert_close(two["course"], one["course"])
    assert not torch.allclose(two["course"], other["course"])
    refits = [load_file(folder / name / "weights.safetensors") for name in names[:2]]
    torch.testing.assert_close(*refits)


@pytest.mark.process
@pytest.mark.slow
def test_what_the_main_process_cannot_do_ends_all(folder):
    """Only the main process looks into the output of train-gates."""
    (folder / "taken").mkdir()
    (folder / "taken" / "note").write_text("mine")
    done = launched(folder, "train-gates", "model", "--target-heads", "0.5", "taken")
    assert done.returncode != 0
    assert "error: The output folder 'taken' already exists" in done.stderr
    assert "headprune/app.py" not in done.stderr  # no traceback of ours
    assert [path.name for path in (folder / "taken").iterdir()] == ["note"]


def test_batches_are_shared_evenly(monkeypatch):
    assert processes.share_of(3) == 3
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert processes.share_of(4) == 2
    for batch in (1, 3):
        with pytest.raises(HeadpruneError, match="make --batch-size a multiple of 2"):
            processes.share_of(batch)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(HeadpruneError, match="The launcher asks for FSDP"):
        processes.share_of(4)


def test_other_commands_are_run_by_one_process(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr("sys.argv", ["headprune", "inspect", "model"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "'inspect' is run by one process, and 4 were started" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "heal"])
def test_what_a_launcher_left_behind_is_named(command, monkeypatch, capsys):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr("sys.argv", ["headprune", command, "model"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "WORLD_SIZE=2 is set" in said and "unset WORLD_SIZE RANK LOCAL_RANK" in said
    with pytest.raises(HeadpruneError, match="WORLD_SIZE=2 is set"):
        processes.on_main(lambda: None)
