"""make demo: a real language model from the package index to a smaller one, proven and evaluated.

Every step is a command of the README, run as a user would.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from fetch_demo_model import FetchError, fetch  # noqa: E402  (a sibling script)

RESULTS = Path("demo-results")
SENTENCE = "The most important thing for the people of this country is"

console = Console()


def headprune(*arguments: object) -> None:
    """Runs a headprune command and shows it."""
    command = ["headprune", *map(str, arguments)]
    console.print(f"\n[bold cyan]$ {' '.join(command)}[/]", soft_wrap=True, highlight=False)
    done = subprocess.run([sys.executable, "-m", *command])
    if done.returncode:
        sys.exit(done.returncode)


def evaluate(model: Path, *more: object) -> dict[str, Any]:
    """Evaluates on the test addresses, into the folder of the run; returns the report."""
    report = model.parent / "report.json"
    options = ["--seq-len", 256, "--max-windows", 24, "--output", report, *more]
    headprune("evaluate", model, "--data", HERE / "test.txt", *options)
    content: dict[str, Any] = json.loads(report.read_text())
    return content


def continuation(model: Path) -> str:
    """A sentence from the cut model, loaded as any user of it would."""
    import torch
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from headprune import from_pretrained

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model)
    inputs = tokenizer(SENTENCE, return_tensors="pt")
    torch.manual_seed(0)
    tokens = from_pretrained(model).generate(**inputs, max_new_tokens=24, do_sample=False)
    text: str = tokenizer.decode(tokens[0], skip_special_tokens=True)
    return text


def closing_table(report: dict[str, Any]) -> Table:
    """Before and after."""
    table = Table(title="SmolLM2-135M before and after")
    for column in ("", "before", "after", "after / before"):
        table.add_column(column, justify="left" if not column else "right")

    def row(name: str, before: float, after: float, digits: int = 0) -> None:
        table.add_row(
            name, f"{before:,.{digits}f}", f"{after:,.{digits}f}", f"{after / before:.3f}"
        )

    before, after = report["against"], report["model"]
    row("query heads", before["cost"]["query_heads"], after["cost"]["query_heads"])
    row("parameters", before["cost"]["parameters"], after["cost"]["parameters"])
    cache = "kv_cache_bytes_per_token"
    row("KV bytes per token", before["cost"][cache], after["cost"][cache])
    row("perplexity", before["metrics"][0]["value"], after["metrics"][0]["value"], 2)
    for name in ("prefill_tokens_per_s", "decode_tokens_per_s"):
        row(
            name.replace("_per_s", "/s").replace("_", " "),
            *(m["speed"][name] for m in (before, after)),
            1,
        )
    return table


def main() -> None:
    """Fetch, train gates, prune, evaluate, generate; share KV heads, evaluate; report."""
    start = time.monotonic()
    try:
        model = fetch("smollm2")
    except FetchError as error:
        console.print(f"[bold red]error:[/] {error}")
        sys.exit(2)
    console.print(f"model: {model} ({time.monotonic() - start:.0f} s)")
    start = time.monotonic()
    cut, shared = RESULTS / "three-quarters", RESULTS / "one-kv-head"
    gates, small, mqa = cut / "gates", cut / "smollm2-small", shared / "smollm2-mqa"
    headprune(
        "train-gates",
        model,
        "--data",
        HERE / "train.txt",
        "--output",
        gates,
        "--overwrite",
        "--target-heads",
        0.75,
        "--steps",
        60,
        "--batch-size",
        4,
        "--seq-len",
        128,
    )
    headprune("prune", model, "--gates", gates, "--output", small, "--overwrite")
    report = evaluate(small, "--against", model)
    console.print("\n[bold]The cut model goes on:[/]", continuation(small), "\n")
    console.print(closing_table(report))
    calibration = ["--calibrate", HERE / "train.txt", "--calibration-tokens", 4096]
    calibration += ["--seq-len", 128]
    headprune("convert-gqa", model, "--kv-heads", 1, *calibration, "--output", mqa, "--overwrite")
    evaluate(mqa, "--against", model)
    headprune("report", cut, shared, "--output", RESULTS / "report.html", "--overwrite")
    console.print(f"{time.monotonic() - start:.0f} s after the download. Results: {RESULTS}/")


if __name__ == "__main__":
    main()
