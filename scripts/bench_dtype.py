"""What half precision costs: every job on a float32 and on a bfloat16 copy of one model.

    python scripts/bench_dtype.py --model FOLDER --data TEST --calibrate TEXT

The copy is the model's weights rounded to bfloat16. Jobs are commands, each in a process of its own
whose time and peak memory are taken; results are measured as in bench_quality.py (the first 40
windows of 512 tokens of the test text, in float32, whatever they are stored in).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from bench_quality import Protocol
from headprune import from_pretrained
from headprune.model.stored import stored_tensors

console = Console()
STORED = ("float32", "bfloat16")
# else holes that glibc keeps between tensors make the peak of a job vary by 5 % between runs
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "100000"}


def copied(model: Path, dtype: str, folder: Path) -> Path:
    """The model in another element type, with its tokenizer."""
    from_pretrained(model, dtype=getattr(torch, dtype)).save_pretrained(folder)
    for file in model.iterdir():
        if not (folder / file.name).exists() and file.suffix != ".safetensors":
            shutil.copyfile(file, folder / file.name)
    return folder


def run(*arguments: object) -> tuple[float, int]:
    """Runs a command; its seconds, and the bytes of memory that it held at most."""
    command = [sys.executable, "-m", "headprune", *map(str, arguments)]
    start = time.monotonic()
    piped: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=os.environ | RETURNED, **piped)
    assert process.stderr is not None
    said = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        console.print(said[-2000:], markup=False)
        raise SystemExit(f"{' '.join(command)} failed")
    return time.monotonic() - start, usage.ru_maxrss * 1024


def jobs(
    model: Path, text: Path, work: Path, tokens: list[int], seeds: list[int]
) -> dict[str, list[list[object]]]:
    """Per job, its commands; the last one writes ``work / "out"``."""
    out = [work / "out"]
    found: dict[str, list[list[object]]] = {}
    for count in tokens:
        some = ["--config", f"calibration_tokens={count}"]
        scores = ["score", model, "--data", text, "--unit", "head", *some]
        cut = ["prune", model, "--scores", work / "scores", "--keep", 0.75, "--layout", "ragged"]
        found[f"25 % of query heads, compensated + refit, {count:,} tokens"] = [
            [*scores, work / "scores"],
            [*cut, "--refit", text, *some, *out],
        ]
        convert = ["convert-gqa", model, "--kv-heads", 1, "--calibrate", text]
        found[f"one KV head, lowrank, {count:,} tokens"] = [[*convert, *some, *out]]
    train = ["train-gates", model, "--data", text, "--target-heads", 0.75, "--unit", "head"]
    for seed in seeds:
        found[f"gates, 60 steps, seed {seed}"] = [
            [*train, "--steps", 60, "--config", f"seed={seed}", work / "gates"],
            ["prune", model, "--gates", work / "gates", "--layout", "ragged", *out],
        ]
    return found


def main(
    model: Annotated[Path, typer.Option(help="Model folder.")],
    data: Annotated[str, typer.Option(help="Test text.")],
    calibrate: Annotated[Path, typer.Option(help="Calibration and training text.")],
    tokens: Annotated[str, typer.Option(help="Calibration tokens.")] = "8192,16384",
    seeds: Annotated[str, typer.Option(help="Seeds of the gates.")] = "0",
    only: Annotated[str, typer.Option(help="Jobs whose name contains this.")] = "",
    windows: Annotated[int, typer.Option(help="Test windows.")] = 40,
    window: Annotated[int, typer.Option(help="Tokens per test window.")] = 512,
    output: Annotated[Path | None, typer.Option(help="Write the rows as JSON.")] = None,
) -> None:
    """Run every job on both copies, measure."""
    protocol = Protocol(str(model), data, windows, window)
    counts, draws = ([int(number) for number in each.split(",")] for each in (tokens, seeds))
    rows = []

    def perplexity(folder: Path) -> float:
        return protocol.perplexity(from_pretrained(folder, dtype=torch.float32))

    with tempfile.TemporaryDirectory() as scratch:
        copies = {dtype: copied(model, dtype, Path(scratch) / dtype) for dtype in STORED}
        whole = {dtype: perplexity(folder) for dtype, folder in copies.items()}
        console.print({"whole": whole, "ratio": whole["bfloat16"] / whole["float32"]})
        for name in jobs(model, calibrate, Path(scratch), counts, draws):
            if only not in name:
                continue
            row: dict[str, Any] = {"job": name}
            for dtype, folder in copies.items():
                with tempfile.TemporaryDirectory(dir=scratch) as work:
                    todo = jobs(folder, calibrate, Path(work), counts, draws)[name]
                    used = [run(*command) for command in todo]
                    row[dtype] = {
                        "perplexity": perplexity(Path(work) / "out"),
                        "seconds": sum(seconds for seconds, _ in used),
                        "peak_bytes": max(peak for _, peak in used),
                        "stored_bytes": sum(
                            t.bytes for t in stored_tensors(Path(work) / "out").values()
                        ),
                    }
            rows.append(row)
            console.print(row)
            if output is not None:
                content = {"model": model.name, "whole": whole, "rows": rows}
                output.write_text(json.dumps(content, indent=2) + "\n")
    columns = ("perplexity", "seconds", "peak_bytes", "stored_bytes")
    table = Table("job", "perplexity, float32", "bfloat16", *(f"{c}, ratio" for c in columns))
    for row in rows:
        full, half = row["float32"], row["bfloat16"]
        cells = [f"{full['perplexity']:.3f}", f"{half['perplexity']:.3f}"]
        table.add_row(row["job"], *cells, *(f"{half[c] / full[c]:.4f}" for c in columns))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
