"""Trainings that are killed again and again, and resumed, end as unbroken ones do: bit by bit.

    python scripts/stress_resume.py [--steps 200] [--every 7] [--seed 0] [--json FILE]

train-gates and heal train tiny models, in one process and in two that share every batch. One of
the processes is killed (SIGKILL) some steps after it began or went on, at a random moment of a
step, of writing a checkpoint, or of what comes after the last step; the same command goes on then.
What comes out is compared file by file with what an unbroken run wrote. A run with another seed
must differ, or the comparison would be worth nothing.

Processes are forked with the environment that torchrun gives to them: to import everything anew for
each of a hundred runs would take longer than they do.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from tests import tiny
from transformers.utils import logging

from headprune.config import (
    ConvertConfig,
    DataConfig,
    HealConfig,
    Resuming,
    Train,
    TrainGatesConfig,
)
from headprune.distillation.heal import heal
from headprune.gates.train_gates import train_gates
from headprune.result.convert_gqa import convert_gqa

COMMANDS = ("train-gates", "heal")
SAVE_EVERY = 3
LIMIT_S = 300.0  # for one run; they take a few seconds
LOG = f"{tempfile.gettempdir()}/stress_resume.{os.getpid()}.log"  # of the processes that train
CHANGING = {"headprune.json": ("created",)}  # what may differ between two runs, by file


@dataclass
class Outcome:
    """What became of one training.

    Attributes:
        command: Which.
        processes: How many trained.
        steps: Optimiser steps.
        kills: How often one of them was killed.
        after_the_last: How many of these kills came after the last step.
        identical: Whether all files are those of the unbroken run.
        other_seed_differs: Whether a run with another seed wrote other ones.
    """

    command: str
    processes: int
    steps: int
    kills: int
    after_the_last: int
    identical: bool
    other_seed_differs: bool


def prepare(home: Path) -> None:
    """A model, its text, and a smaller model to heal."""
    tiny.save(tiny.model("llama-mha"), home / "model")
    (home / "text.txt").write_text(tiny.text(2_000))
    convert_gqa(home / "model", home / "smaller", ConvertConfig(kv_heads=2, merge="mean"))


def training(
    command: str, home: Path, output: str, steps: int, seed: int = 0, resume: bool = False
) -> Callable[[], object]:
    """One training, ready to start."""
    data = DataConfig(source=str(home / "text.txt"))
    shared: dict[str, Any] = {"steps": steps, "batch_size": 4, "seq_len": 16, "seed": seed}
    shared["save_every"] = SAVE_EVERY
    if command == "heal":
        healing = HealConfig(learning_rate=5e-3, **shared)
        places = home / "smaller", home / "model"
        return lambda: heal(*places, data, home / output, healing, Resuming(resume=resume))
    config = TrainGatesConfig(target_heads=0.5, train=Train.ATTENTION, weight_lr=1e-3, **shared)
    return lambda: train_gates(
        home / "model", data, home / output, config, rerun=Resuming(resume=resume)
    )


def started(work: Callable[[], object], processes: int) -> list[int]:
    """Forks processes that do some work together, as torchrun starts them; returns their ids."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = []
    for rank in range(processes):
        pid = os.fork()
        if pid:
            found.append(pid)
            continue
        try:
            if processes > 1:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1), os.dup2(log, 2)
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return found


def finished(pids: list[int]) -> bool:
    """Waits for processes; whether all of them ended well. Those that hang are killed."""
    deadline, codes = time.monotonic() + LIMIT_S, dict[int, int]()
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        late = time.monotonic() > deadline
        if late or any(codes.values()):  # the launcher ends the others
            for pid in set(pids) - codes.keys():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return not any(codes.values())


def lines(file: Path) -> int:
    """Whole lines of a file; 0 if there is none."""
    return file.read_bytes().count(b"\n") if file.exists() else 0


def killed(pids: list[int], history: Path, step: int, chance: random.Random) -> bool:
    """Kills one of some processes some moment after a step was recorded; False if they ended."""
    deadline = time.monotonic() + LIMIT_S
    while lines(history) < step:
        if time.monotonic() > deadline or os.waitpid(pids[0], os.WNOHANG)[0]:
            raise SystemExit(f"No step {step} was recorded in '{history}': see {LOG}")
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.04))
    os.kill(chance.choice(pids), signal.SIGKILL)
    return not finished(pids)


def latest(checkpoints: Path) -> int:
    """The step of the newest checkpoint."""
    names = [path.name for path in checkpoints.glob("checkpoint-*")]
    return max((int(name.removeprefix("checkpoint-")) for name in names), default=0)


def broken(
    command: str, home: Path, steps: int, every: int, processes: int, chance: random.Random
) -> tuple[str, int, int]:
    """A training that is killed every few steps; its output, and the kills, those at the end too.

    Every run gets as far as a new checkpoint before it is killed.
    """
    output, kills, after_the_last = f"broken/{command}-{processes}", 0, 0
    work = home / f"{output}-checkpoints"
    while True:
        begun = (work / "config.yaml").exists()
        pids = started(training(command, home, output, steps, resume=begun), processes)
        done = latest(work / "checkpoints")
        if done >= steps or after_the_last:
            if not finished(pids):
                raise SystemExit(f"{command} did not go on from step {done}: see {LOG}")
            return output, kills, after_the_last
        step = min(steps, done + chance.randint(SAVE_EVERY + 1, max(SAVE_EVERY + 1, 2 * every)))
        if not killed(pids, work / "history.jsonl", step, chance):
            return output, kills, after_the_last
        kills += 1
        after_the_last += step == steps


def content(file: Path) -> bytes:
    """What a file holds, but for times."""
    names = CHANGING.get(file.name)
    if names is None:
        return file.read_bytes()
    record = json.loads(file.read_text())
    return json.dumps({k: v for k, v in record.items() if k not in names}).encode()


def same(one: Path, other: Path) -> bool:
    """Whether two folders hold the same files."""
    held = [
        {p.relative_to(f): content(p) for p in f.rglob("*") if p.is_file()} for f in (one, other)
    ]
    differing = [n for n in held[0].keys() | held[1].keys() if held[0].get(n) != held[1].get(n)]
    for name in differing:
        print(f"  {one} and {other} differ in {name}")
    return not differing


def stress(command: str, home: Path, steps: int, every: int, processes: int, seed: int) -> Outcome:
    """Holds a broken training against an unbroken one."""
    whole, other = f"whole/{command}-{processes}", f"other/{command}-{processes}"
    for output, own in ((whole, 0), (other, 1)):
        if not finished(started(training(command, home, output, steps, seed=own), processes)):
            raise SystemExit(f"{command} failed without being killed: see {LOG}")
    chance = random.Random(f"{seed} {command} {processes}")
    ended, kills, after_the_last = broken(command, home, steps, every, processes, chance)
    weights = "model.safetensors" if command == "heal" else "gates.safetensors"
    differs = (home / whole / weights).read_bytes() != (home / other / weights).read_bytes()
    identical = same(home / whole, home / ended)
    kept = {path.name for path in (home / "whole").iterdir()}
    litter = sorted({path.name for path in (home / "broken").iterdir()} - kept)
    if litter:
        raise SystemExit(f"Left behind: {', '.join(litter)}.")
    return Outcome(command, processes, steps, kills, after_the_last, identical, differs)


def main() -> None:
    """Runs all, and exits with 1 if one training did not end as it should."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=7, help="steps between kills, on average")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, help="where the outcomes are written")
    asked = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        if not finished(started(lambda: prepare(home), 1)):
            raise SystemExit(f"The models could not be made: see {LOG}")
        for command in COMMANDS:
            for processes in asked.processes:
                found = stress(command, home, asked.steps, asked.every, processes, asked.seed)
                outcomes.append(found)
                how = "identical" if found.identical else "DIFFERENT"
                print(f"{command}, {processes} process(es): {found.kills} kills, {how}", flush=True)
    if asked.json:
        asked.json.write_text(
            json.dumps([asdict(outcome) for outcome in outcomes], indent=2) + "\n"
        )
    Path(LOG).unlink()
    sys.exit(not all(found.identical and found.other_seed_differs for found in outcomes))


if __name__ == "__main__":
    main()
