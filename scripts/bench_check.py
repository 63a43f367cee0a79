"""How often `headprune check` cries wolf, and how often it finds a real loss.

    headprune check --update-baseline FOLDER --data TEXT --baseline base.json ...
    headprune check --update-baseline FOLDER --config dtype=bfloat16 --baseline same.json ...
    headprune check --update-baseline CUT --baseline other.json ...
    python scripts/bench_check.py --base base.json --same same.json --other other.json

The losses per window that these files hold are a population. Every seed draws windows from it, with
repeats, and judges them as the command does. Three kinds of models:

same    the same weights under other numerics: unchanged by any standard
equal   other weights: the losses of the cut model, shifted by a constant so that the perplexity of
        the population is exactly the baseline's. With a limit of +0 % it lies on the limit, where
        false alarms are most frequent.
worse   the same, shifted to a perplexity exactly 3 % higher
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from headprune.config import CheckConfig
from headprune.evaluation.comparison import Interval, bootstrap
from headprune.evaluation.metrics import Samples
from headprune.regression.baseline import read_baseline
from headprune.regression.limits import parse_limit
from headprune.regression.verdicts import Verdict, compared, judge

DEFAULTS = CheckConfig(model="", data="")
console = Console()


def shifted(base: Samples, other: Samples, change: float) -> Samples:
    """``other`` with a constant added to every token's loss, so that its perplexity is known."""
    tokens, nll = other.columns["tokens"], other.columns["nll_nats"]
    wanted = base.columns["nll_nats"].sum() + tokens.sum() * math.log1p(change)
    constant = (wanted - nll.sum()) / tokens.sum()
    return Samples({**other.columns, "nll_nats": nll + constant * tokens})


def intervals(base: Samples, other: Samples, n: int, seeds: int) -> list[Interval]:
    """The interval of every seed, each of which draws other windows and other resamples."""
    change, total, found = parse_limit("perplexity <= +0 %"), base.count("perplexity"), []
    for seed in range(seeds):
        rows = np.random.default_rng([seed, n]).integers(0, total, n)
        ours, theirs = (Samples({k: v[rows] for k, v in s.columns.items()}) for s in (other, base))
        statistic = compared(change, ours, theirs)
        found.append(bootstrap(statistic, n, DEFAULTS.resamples, DEFAULTS.confidence, seed))
    return found


def main(
    base: Annotated[Path, typer.Option(help="Baseline of the model.")],
    same: Annotated[Path, typer.Option(help="Baseline of it under other numerics.")],
    other: Annotated[list[Path], typer.Option(help="Baseline of a cut model (repeatable).")],
    sizes: Annotated[str, typer.Option(help="Sample sizes.")] = "64,128,256",
    limits: Annotated[str, typer.Option(help="Limits, in per cent.")] = "0,1,2",
    seeds: Annotated[int, typer.Option(help="Seeds per row.")] = 1000,
    output: Annotated[Path | None, typer.Option(help="Write the rows as JSON.")] = None,
) -> None:
    """Simulate."""
    start, population = time.monotonic(), read_baseline(base).as_samples()
    unchanged = read_baseline(same).as_samples()
    cases = [("same", unchanged)]
    for path in other:
        cut = read_baseline(path).as_samples()
        for what, change in (("equal", 0.0), ("worse", 0.03)):
            cases.append((f"{what}, {path.stem}", shifted(population, cut, change)))
    rows = []
    for n, (name, samples) in itertools.product(map(int, sizes.split(",")), cases):
        found = intervals(population, samples, n, seeds)
        for percent in limits.split(","):
            limit = parse_limit(f"perplexity <= +{percent} %")
            counts = Counter(judge(limit, interval).verdict.value for interval in found)
            row: dict[str, str | int] = {"model": name, "n": n, "limit": limit.text}
            rows.append(row | {verdict.value: counts[verdict.value] for verdict in Verdict})
    table = Table(title=f"verdicts at confidence {DEFAULTS.confidence:g}, {seeds} seeds each")
    for name in rows[0]:
        table.add_column(name, justify="left" if name in ("model", "limit") else "right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(table)
    console.print(f"{time.monotonic() - start:.0f} s")
    if output is not None:
        output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
