"""What ``--config placement=layers`` costs and saves: ``bench_layers.py TEXT [LAYERS [WIDTH]]``.

Makes a Llama in bfloat16 with random weights and so many equal layers (24) of a width (1024) in a
temporary folder (TMPDIR). A refit and a merge run with the whole model in memory and then layer by
layer, each once and as a process of its own. Prints seconds, the most resident memory (VmHWM) above
that of the imports, and whether both wrote the same weights, byte for byte.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from bench_scale import child

SIZES = ("24", "1024")
TOKENS = 4096
WAYS = ("whole", "layers")


def jobs(model: Path, plan: Path, text: str) -> dict[str, list[str]]:
    """Commands, by the name of what they do, without output and placement."""
    some = [
        "--config",
        f"calibration_tokens={TOKENS}",
        "--config",
        "seq_len=512",
        "--config",
        "dtype=float32",
    ]
    cut = ["prune", str(model), "--plan", str(plan), "--refit", text, "--layout", "ragged"]
    merge = ["convert-gqa", str(model), "--kv-heads", "4", "--merge", "lowrank"]
    return {
        "half of the heads, refit": [*cut, *some],
        "16 KV heads to 4, lowrank": [*merge, "--calibrate", text, *some],
    }


def same(one: Path, other: Path) -> bool:
    """Whether two folders hold the same weights, byte for byte."""
    files = [sorted(folder.glob("*.safetensors")) for folder in (one, other)]
    names = [[file.name for file in each] for each in files]
    pairs = zip(*files, strict=True) if names[0] == names[1] else ()
    return bool(names[0]) and names[0] == names[1] and all(_equal(a, b) for a, b in pairs)


def _equal(one: Path, other: Path) -> bool:
    return one.read_bytes() == other.read_bytes()


def measured(name: str, command: list[str], home: Path, imported: float) -> str:
    """The row of a job, run in both ways."""
    seconds, peaks = [], []
    for way in WAYS:
        more = ["--config", f"placement={way}", str(home / way), "--overwrite"]
        took, peak = child("command", *command, *more)
        seconds.append(took)
        peaks.append(peak - imported)
    return (
        f"| {name} | {peaks[0]:,.0f} | {peaks[1]:,.0f} | {peaks[1] / peaks[0]:.3f} | "
        f"{seconds[0]:.0f} | {seconds[1]:.0f} | {seconds[1] / seconds[0]:.2f} | "
        f"{'yes' if same(home / WAYS[0], home / WAYS[1]) else 'NO'} |"
    )


def main() -> None:
    """Measures both jobs and prints the table."""
    text, *given = sys.argv[1:]
    sizes = *given, *SIZES[len(given) :]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        model, plan = home / "model", home / "plan.json"
        child("make", model, *sizes)
        child("plan", model, plan)
        _, imported = child("imports")
        print(
            "| job | whole, MB | by layers, MB | ratio | whole, s | by layers, s | ratio | same |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for name, command in jobs(model, plan, text).items():
            print(measured(name, command, home, imported), flush=True)


if __name__ == "__main__":
    main()
