"""Writes the golden files of this release, once: python -m tests.golden.write FOLDER.

Those of earlier releases stay as they are: what people hold does not change either. Beside each
format stands a damaged sibling, which must be refused.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from headprune.cli import app
from tests import tiny

SIZES = {"hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 4}
SMALL = "--seq-len 16 --calibration-tokens 256"
TRAINING = {"target_heads": 0.5, "steps": 2, "batch_size": 2, "seq_len": 16}
RECIPE: dict[str, Any] = {
    "model": "model",
    "output": "run",
    "data": {"train": {"source": "text.txt"}},
    "steps": {"train-gates": TRAINING, "prune": {}},
}
COMMANDS = (
    f"score model --data text.txt --criterion fisher --criterion random {SMALL} --output scores",
    "plan model --scores scores --criterion fisher --keep 0.5 --output plan.json",
    "train-gates model --data text.txt --target-heads 0.5 --train attention --steps 2 "
    "--batch-size 2 --seq-len 16 --output gates",
    "prune model --gates gates --layout uniform --output result",
    "evaluate result --data text.txt --against model --no-speed --seq-len 16 --max-windows 4 "
    "--output report.json",
    "check --model result --against model --data text.txt --limit 'perplexity <= +90 %' "
    "--baseline baseline.json --update-baseline --seq-len 16 --max-windows 8",
    "run job.yaml",
)
KEPT = ("plan.json", "gates", "scores", "result", "report.json", "run/run.json", "baseline.json")


def main(target: Path) -> None:
    """Makes everything in a folder and keeps what is a format of ours."""
    import shlex
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        os.chdir(made)
        with mock.patch.dict(tiny.SIZES, SIZES):
            tiny.save(tiny.model("llama-gqa"), Path("model"))
        Path("text.txt").write_text(tiny.text(600))
        Path("job.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))
        for command in COMMANDS:
            sys.argv = ["headprune", *shlex.split(command)]
            try:
                app.main()
            except SystemExit as stop:
                if stop.code:
                    raise
        for name in KEPT:
            place = target / Path(name).name
            place.parent.mkdir(parents=True, exist_ok=True)
            if Path(name).is_dir():
                shutil.copytree(name, place)
            else:
                shutil.copy(name, place)
    damage(target)


def damage(target: Path) -> None:
    """Writes the damaged siblings."""
    damaged = target / "damaged"
    damaged.mkdir()
    for name, change in CHANGES.items():
        content = json.loads((target / name).read_text(encoding="utf-8"))
        change(content)
        place = damaged / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for name in ("gates/gates.safetensors", "scores/scores.safetensors"):
        content = (target / name).read_bytes()
        (damaged / name).write_bytes(content[: len(content) // 2])


def _set(*path: str, to: object) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for name in path[:-1]:
            content = content[name]
        content[path[-1]] = to

    return change


CHANGES: dict[str, Callable[[Any], None]] = {
    "plan.json": _set("unit", to="heads"),
    "gates/gates.json": lambda content: None,  # its tensors are cut short
    "scores/scores.json": lambda content: None,
    "result/headprune.json": _set("done", "evidence", "id", to="gates"),
    "report.json": _set("model", "metrics", to="good"),
    "run.json": _set("steps", to=[]),
    "baseline.json": _set("metrics", to=[1, 2]),
}

if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
