"""What the cases damage, interrupt and replace: tiny models and everything made of them, once."""

from __future__ import annotations

import gzip
import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow
import pyarrow.parquet
import yaml
from filelock import FileLock
from transformers import PreTrainedModel

from headprune.context import Context
from tests import gguf_words, tiny
from tests.campaign.watched import command, watched

# settings that make a command short
REFITTING = "--config calibration_tokens=64 --config seq_len=16"
SCORING = f"{REFITTING} --config batch_size=2"
TRAINING = "--steps 6 --config batch_size=2 --config save_every=2 --config seq_len=16"
MEASURING = "--max-windows 2 --config seq_len=16 --config batch_size=2"
TELLING = "--config sequences=4 --config seq_len=16 --config batch_size=2 --config resamples=20"

GATES = f"train-gates llama --data text.txt --target-heads 0.5 {TRAINING}"
ROLES = f"roles llama --data text.txt {TELLING}"
HEAL = f"heal gqa --teacher mha --data text.txt {TRAINING}"
# what goes on with the trainings that were killed
RESUME = {"gates": f"{GATES} out --resume", "heal": f"{HEAL} out --resume"}

CHECK = {
    "model": "llama",
    "data": "text.txt",
    "baseline": "baseline.json",
    "against": "llama",
    "limits": ["perplexity <= +2 %", "perplexity >= 50 %", "query_heads == 12"],
    "seq_len": 16,
    "max_windows": 12,  # fewer than ten that are all alike decide nothing
}
TRAIN = {"target_heads": 0.5, "gate_lr": 0.5, "objective": "lm"}
# a parsed sentence per line: word, its head, the relation to it
_TREES = (
    (("w1", 2, "nsubj"), ("w2", 0, "root"), ("w3", 2, "obj"), ("w4", 3, "amod")),
    (("w5", 3, "det"), ("w6", 3, "amod"), ("w7", 4, "nsubj"), ("w8", 0, "root")),
)
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")


def make(place: Path) -> Path:
    """Makes everything, unless it is there."""
    place.mkdir(parents=True, exist_ok=True)
    with FileLock(place / ".lock"):
        if not (place / ".complete").exists():
            # forked: a process that has trained can fork none that train
            done = watched(lambda: _models(place), place, limit_s=300)
            if done.code:
                raise RuntimeError(f"The originals cannot be made: {done.out}{done.err}")
            _commands(place)
            (place / ".complete").touch()
    return place


def small(case: str) -> PreTrainedModel:
    """A tiny model of two layers."""
    with mock.patch.dict(tiny.SIZES, dict.fromkeys(_LAYERS, 2)):
        return tiny.model(case)


def _models(place: Path) -> None:
    for name, case in (("llama", "llama-gqa"), ("mha", "llama-mha"), ("bert", "bert-mlm")):
        tiny.save(small(case), place / name)
    for name in ("gpt2", "t5"):
        tiny.save(small(name), place / name)
    small("llama-gqa").save_pretrained(place / "sharded", max_shard_size="40KB")
    tiny.tokenizer().save_pretrained(place / "sharded")
    _speaking(place / "speaking")
    _legacy(place / "legacy")
    _data(place)


def _speaking(folder: Path) -> None:
    """A model whose tokenizer llama.cpp has."""
    model = small("llama-gqa")
    model.resize_token_embeddings(gguf_words.SIZE)
    model.save_pretrained(folder)
    gguf_words.words().save_pretrained(folder)


def _legacy(folder: Path) -> None:
    """A folder as transformers 4 left it after prune_heads."""
    from tests.test_verify import old_folder

    old_folder(small("gpt2"), folder, {0: [1, 4]})


def _data(place: Path) -> None:
    words = tiny.text(1_000)
    (place / "text.txt").write_text(words)
    (place / "text.txt.gz").write_bytes(gzip.compress(words.encode(), mtime=0))
    rows = [{"text": tiny.text(40, seed), "label": seed % 2} for seed in range(24)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (place / "rows.jsonl").write_text(lines)
    (place / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    for name, sign in (("rows.csv", ","), ("rows.tsv", "\t")):
        body = "".join(f"{row['text']}{sign}{row['label']}\n" for row in rows)
        (place / name).write_text(f"text{sign}label\n{body}")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), place / "rows.parquet")
    (place / "check.yaml").write_text(yaml.safe_dump(CHECK, sort_keys=False))
    (place / "train.yaml").write_text(yaml.safe_dump(TRAIN, sort_keys=False))
    (place / "short.json").write_text(json.dumps({"model.layers.0.self_attn": [0, 1]}))
    (place / "heads.json").write_text("[3, 1]")
    (place / "trees.conllu").write_text("".join(map(_sentence, _TREES * 8)))


def _sentence(words: tuple[tuple[str, int, str], ...]) -> str:
    rows = [
        f"{at}\t{word}\t_\tNOUN\t_\t_\t{head}\t{relation}\t_\t_\n"
        for at, (word, head, relation) in enumerate(words, 1)
    ]
    return f"# text = {' '.join(word for word, _, _ in words)}\n{''.join(rows)}\n"


def _commands(place: Path) -> None:
    """What headprune makes of them."""
    scored = f"--data text.txt --criterion magnitude {SCORING}"
    for line in (
        f"score llama --criterion fisher {scored} scores",
        "prune llama --scores scores --criterion fisher --keep 0.5 --dry-run --save-plan plan.json",
        "prune llama --plan plan.json result",
        "convert-gqa mha --kv-heads 2 gqa",
        f"{GATES} --train attention gates",
        f"{HEAL} healed",
        f"{ROLES} roles",
        "export result --to vllm exported",
        "export speaking --to gguf --config prove=read-back spoken",
        f"evaluate result --data text.txt --against llama --no-speed {MEASURING} report.json",
        "check --config check.yaml --update-baseline",
    ):
        well(line, place)
    # a report of check goes to stdout
    (place / "checked.json").write_text(well("check --config check.yaml --json", place))
    for name in RESUME:
        _interrupted(place / f"resume-{name}", name, place)


def well(line: str, place: Path) -> str:
    """Runs a command that must succeed; what it wrote to stdout."""
    done = command(line, place, limit_s=300)
    if done.code:
        raise RuntimeError(f"headprune {line}: {done.out}{done.err}")
    return done.out


def _interrupted(place: Path, name: str, originals: Path) -> None:
    """A folder in which a training was killed after its fifth step."""
    place.mkdir()
    for source in ("llama", "mha", "gqa", "text.txt"):
        (place / source).symlink_to(originals / source)

    def killed(step: int, *_: object) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    def train() -> None:
        from headprune.config import DataConfig, HealConfig, TrainGatesConfig
        from headprune.distillation.heal import heal
        from headprune.gates.train_gates import train_gates

        data = DataConfig(source="text.txt")
        shared: dict[str, Any] = {"steps": 6, "batch_size": 2, "save_every": 2, "seq_len": 16}
        if name == "gates":
            gated = TrainGatesConfig(target_heads=0.5, **shared)
            train_gates("llama", data, Path("out"), gated, context=Context(step=killed))
        else:
            heal(
                "gqa", "mha", data, Path("out"), HealConfig(**shared), context=Context(step=killed)
            )

    done = watched(train, place, limit_s=120)
    if done.code != -signal.SIGKILL:
        raise RuntimeError(f"The training was not killed: {done.code} {done.err}")
