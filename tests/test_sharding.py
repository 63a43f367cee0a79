"""A model split over two processes trains its gates as a whole one does."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headprune import devices, processes
from headprune.config import DataConfig, Train, TrainGatesConfig
from headprune.errors import HeadpruneError
from headprune.gates.train_gates import train_gates
from headprune.model import sharding
from headprune.model.sharding import refuse_to_shard
from headprune.schemas.gates import read_metadata
from tests import forked, tiny

SETTINGS: dict[str, Any] = {
    **{"target_heads": 0.5, "method": "gradual", "steps": 6},
    **{"batch_size": 4, "seq_len": 16},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharding")
    tiny.save(tiny.model("llama-mha"), folder / "model")
    (folder / "text.txt").write_text(tiny.text(2_000))
    return folder


def command(output: str, *others: str, **settings: Any) -> list[str]:
    settings = SETTINGS | settings
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    return ["train-gates", "model", "--data", "text.txt", "--output", output, *options, *others]


def losses(folder: Path) -> list[float]:
    lines = (folder / "history.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def apart(one: Path, other: Path) -> tuple[bool, float]:
    """Whether other heads were kept, and how far losses are apart."""
    a, b = (load_file(place / "gates.safetensors")["kept"] for place in (one, other))
    pairs = zip(losses(one), losses(other), strict=True)
    return not torch.equal(a, b), max(abs(x - y) for x, y in pairs)


@pytest.mark.process
def test_a_model_in_shards_trains_as_one_process_does(folder: Path) -> None:
    done = forked.together(2, *command("two", "--shard"), folder=folder)
    assert done.returncode == 0, done.stderr
    text = DataConfig(source=str(folder / "text.txt"))
    for name, seed in (("one", 0), ("other", 1)):
        config = TrainGatesConfig(**SETTINGS, seed=seed)
        train_gates(folder / "model", text, folder / name, config)
    others_kept, far = apart(folder / "one", folder / "two")
    assert not others_kept and far < 1e-5
    assert apart(folder / "one", folder / "other")[1] > 1e-2  # other batches would show
    one, two = (read_metadata(folder / name).model for name in ("one", "two"))
    assert one == two
    assert not list(folder.glob("two-*"))


def share_of_weights(folder: str, rank: int, port: int) -> None:
    """Of a process of two: writes what share of all weights it holds, after a run."""
    import os

    group = {"WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in group.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    from headprune import placements
    from headprune.config import Dtype
    from headprune.model.opening import load

    with devices.running_on("cpu"), placements.sharding(True):
        net, _ = load(f"{folder}/model", Dtype.AUTO, False, False)
    parts: list[Any] = list(net.parameters())
    held = sum(part.to_local().numel() for part in parts)
    everything = sum(part.numel() for part in parts)
    Path(folder, f"share-{rank}").write_text(str(held / everything))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.mark.process
def test_each_process_holds_half_of_the_weights(folder: Path) -> None:
    port = free_port()
    ranks = [
        forked._started(forked._bare, ({}, share_of_weights, (str(folder), rank, port)))
        for rank in (0, 1)
    ]
    for rank in ranks:
        rank.join()
    shares = [float((folder / f"share-{rank}").read_text()) for rank in (0, 1)]
    assert sum(shares) == pytest.approx(1, abs=1e-6)
    assert max(shares) <= 0.55


def start(folder: Path, *arguments: str) -> list[forked.Process]:
    """Two processes that are not waited for."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
    shared |= {"MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": ""}
    return [
        forked.Process(
            arguments, folder=folder, environment=shared | {"RANK": rank, "LOCAL_RANK": rank}
        )
        for rank in ("0", "1")
    ]


@pytest.mark.process
@pytest.mark.parametrize("killed", [0, 1])
def test_where_one_is_killed_the_other_says_so_and_the_run_goes_on(
    folder: Path, killed: int
) -> None:
    name = f"long-{killed}"
    long = command(name, "--shard", steps=40, save_every=1)
    ranks = start(folder, *long)
    checkpoints = folder / f"{name}-checkpoints" / "checkpoints"
    while not list(checkpoints.glob("checkpoint-*")) and all(r.running() for r in ranks):
        time.sleep(0.01)
    ranks[killed].send_signal(signal.SIGKILL)
    ends: list[subprocess.CompletedProcess[str]] = [rank.finish() for rank in ranks]
    assert ends[killed].returncode == -signal.SIGKILL
    other = ends[1 - killed]
    assert other.returncode == 2, other.stderr
    assert "Another of the 2 processes ended. Go on with the same command and --resume." in (
        " ".join(other.stderr.split())
    )
    assert not (folder / name).exists()
    again = [word for word in long if killed or word != "--shard"]  # in shards or not
    done = forked.together(2, *again, "--resume", folder=folder)
    assert done.returncode == 0, done.stderr
    if not (folder / "unbroken").exists():
        whole = forked.together(2, *command("unbroken", steps=40, save_every=40), folder=folder)
        assert whole.returncode == 0, whole.stderr
    others_kept, far = apart(folder / "unbroken", folder / name)
    assert not others_kept and far < 1e-5


def test_what_cannot_be_split_is_refused(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    with pytest.raises(HeadpruneError, match="one was started. Use 'torchrun"):
        refuse_to_shard()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with devices.running_on("cpu"):
        refuse_to_shard()
        moved = TrainGatesConfig(**SETTINGS, train=Train.ATTENTION)
        text = DataConfig(source=str(folder / "text.txt"))
        with pytest.raises(HeadpruneError, match="--train attention changes them"):
            train_gates(folder / "model", text, folder / "moved", moved, shard=True)
        with monkeypatch.context() as patch:
            patch.setattr(sharding.transformers, "__version__", "5.18.1")
            with pytest.raises(HeadpruneError, match=r"needs transformers 5.19, and 5.18.1 is"):
                refuse_to_shard()
            patch.setattr(sharding.transformers, "__version__", "5.19.0.dev0")
            refuse_to_shard()
        gpu = torch.device("cuda")
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: gpu)
        with pytest.raises(HeadpruneError, match="--device is cpu. Give --device cuda"):
            refuse_to_shard()


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED", "PARALLELISM_CONFIG"])
def test_other_ways_of_splitting_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "false")
    assert processes.share_of(4) == 4
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(HeadpruneError, match="or with --shard with a part"):
        processes.share_of(4)
