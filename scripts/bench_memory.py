"""How much memory a command takes for a text of any size: ``python scripts/bench_memory.py [GB]``.

Makes a tiny model and a text of so many gigabytes in a temporary folder (TMPDIR), runs ``headprune
evaluate --max-windows 20`` on it, as JSONL, as text and as .gz, and prints seconds and the most
resident memory of the process.
"""

from __future__ import annotations

import gzip
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests import tiny

LINE = 20_000  # words


def lines(size: int) -> list[str]:
    """Lines of words of the tiny tokenizer and others, as many as give ``size`` bytes."""
    draw = random.Random(0)
    words = [f"w{i}" for i in range(50)]
    some = [" ".join(draw.choices(words, k=LINE)) + "\n" for _ in range(64)]
    return [some[i % len(some)] for i in range(size // len(some[0]) + 1)]


def main() -> None:
    """Runs the command on every form of the text."""
    size = int(float(sys.argv[1] if len(sys.argv) > 1 else 1) * 1e9)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny.save(tiny.model("llama-gqa"), folder / "model")
        for form in ("rows.jsonl", "text.txt", "text.txt.gz"):
            path = folder / form
            with gzip.open(path, "wt", 1) if form.endswith("gz") else path.open("w") as file:
                for line in lines(size):
                    file.write(json.dumps({"text": line}) + "\n" if "jsonl" in form else line)
            command = (
                f"headprune evaluate {model} --data {path} --max-windows 20 --config seq_len=32"
            )
            start = time.perf_counter()
            words = [sys.executable, "-m", *command.split(), "--no-speed", "--json"]
            child = subprocess.run(words, check=False, capture_output=True, text=True)
            seconds = time.perf_counter() - start
            most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
            print(f"{form}: exit {child.returncode}, {seconds:.1f} s, at most {most:.2f} GB so far")
            if child.returncode:
                print(child.stderr)
            path.unlink()


if __name__ == "__main__":
    main()
