"""How often `headprune check` cries wolf, and how often it finds a real loss: the README's table.

    headprune check --update-baseline --model FOLDER --data TEXT --baseline base.json ...
    headprune check --update-baseline --model FOLDER --dtype bfloat16 --baseline same.json ...
    headprune check --update-baseline --model CUT --baseline other.json ...
    python scripts/bench_check.py --base base.json --same same.json --other other.json

The losses per window that these files hold are a population. Every seed draws windows from it, with
repeats, and judges them as the command does. Three kinds of models:

same      the same weights under other numerics: unchanged by any standard
equal     other weights, whose losses differ window by window as those of the cut model do, shifted
          by a constant so that the perplexity of the population is exactly the baseline's
at limit  shifted to lie exactly on the limit, where the false alarms are most frequent
+3 %      shifted to a perplexity exactly 3 % higher
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from headprune.config import CheckConfig
from headprune.evaluation.comparison import bootstrap
from headprune.evaluation.samples import Samples
from headprune.regression.baseline import read_baseline
from headprune.regression.limits import parse_limit
from headprune.regression.verdicts import Verdict, compared, judge

DEFAULTS = CheckConfig(model="", data="")
console = Console()


@dataclass(frozen=True)
class Setting:
    """One row: a model, a limit, a sample size."""

    model: str
    true_change: float
    limit: float
    n: int


def shifted(base: Samples, other: Samples, change: float) -> Samples:
    """``other`` with a constant added to every token's loss, so that its perplexity is known."""
    tokens, nll = other.columns["tokens"], other.columns["nll_nats"]
    wanted = base.columns["nll_nats"].sum() + tokens.sum() * math.log1p(change)
    constant = (wanted - nll.sum()) / tokens.sum()
    return Samples({**other.columns, "nll_nats": nll + constant * tokens})


def verdicts(base: Samples, other: Samples, setting: Setting, seeds: int) -> Counter[Verdict]:
    """Verdicts over seeds, each of which draws other windows and other resamples."""
    limit = parse_limit(f"perplexity <= {100 * setting.limit:+} %")
    found: Counter[Verdict] = Counter()
    for seed in range(seeds):
        rows = np.random.default_rng([seed, setting.n]).integers(
            0, base.count("perplexity"), setting.n
        )
        ours, theirs = (Samples({k: v[rows] for k, v in s.columns.items()}) for s in (other, base))
        interval = bootstrap(
            compared(limit, ours, theirs), setting.n, DEFAULTS.resamples, DEFAULTS.confidence, seed
        )
        found[judge(limit, interval).verdict] += 1
    return found


def main(
    base: Annotated[Path, typer.Option(help="Baseline of the model.")],
    same: Annotated[Path, typer.Option(help="Baseline of it under other numerics.")],
    other: Annotated[list[Path], typer.Option(help="Baseline of a cut model (repeatable).")],
    sizes: Annotated[str, typer.Option(help="Sample sizes.")] = "32,64,128",
    limits: Annotated[str, typer.Option(help="Limits, in per cent.")] = "0.5,1,2",
    seeds: Annotated[int, typer.Option(help="Seeds per row.")] = 1000,
    output: Annotated[Path | None, typer.Option(help="Write the rows as JSON.")] = None,
) -> None:
    """Simulate."""
    start, population = time.monotonic(), read_baseline(base).as_samples()
    unchanged = read_baseline(same).as_samples()
    cut = {path.stem: read_baseline(path).as_samples() for path in other}
    rows = []
    for n in map(int, sizes.split(",")):
        for limit in (float(text) / 100 for text in limits.split(",")):
            cases = [("same", 0.0, unchanged)]
            for name, samples in cut.items():
                for what, change in (("equal", 0.0), ("at limit", limit), ("+3 %", 0.03)):
                    cases.append((f"{what}, {name}", change, shifted(population, samples, change)))
            for name, change, samples in cases:
                setting = Setting(name, change, limit, n)
                found = verdicts(population, samples, setting, seeds)
                rows.append(
                    {
                        "model": name,
                        "limit_percent": 100 * limit,
                        "n": n,
                        "seeds": seeds,
                        **{v.value.replace(" ", "_"): found[v] for v in Verdict},
                    }
                )
    table = Table(title=f"verdicts at confidence {DEFAULTS.confidence:g}, {seeds} seeds each")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="left" if name == "model" else "right")
    for row in rows:
        table.add_row(*(f"{v:g}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)
    console.print(f"{time.monotonic() - start:.0f} s")
    if output is not None:
        output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
