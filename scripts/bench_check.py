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

    python scripts/bench_check.py --sizes 3,30,300

Without files, pairs of synthetic examples are drawn, whose true difference is at a relative limit
or beyond it: whatever passes there, passes falsely.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from headprune.config import CheckConfig
from headprune.evaluation.comparison import Interval
from headprune.evaluation.metrics import Samples, interval_of
from headprune.regression.baseline import read_baseline
from headprune.regression.limits import parse_limit
from headprune.regression.verdicts import Verdict, judge, number_of

DEFAULTS = CheckConfig(model="", data="")
Pairs = Callable[[np.random.Generator, int], tuple[Samples, Samples]]
console = Console()


def labelled(gained: float, lost: float, right: float = 0.8) -> Pairs:
    """Pairs of labels, by the shares that the model gains and loses of all examples."""

    def draw(generator: np.random.Generator, n: int) -> tuple[Samples, Samples]:
        base, chance = generator.random(n) < right, generator.random(n)
        model = np.where(base, chance >= lost / right, chance < gained / (1 - right))
        return Samples({"hits": model.astype(float)}), Samples({"hits": base.astype(float)})

    return draw


def windows(change: float, spread: float = 0.03) -> Pairs:
    """Pairs of losses of windows: those of the model differ by noise and a constant."""

    def draw(generator: np.random.Generator, n: int) -> tuple[Samples, Samples]:
        tokens, base = np.full(n, 255.0), generator.normal(3.6, 0.3, n)
        model = base + generator.normal(math.log1p(change), spread, n)
        ours, theirs = ({"nll_nats": tokens * loss, "tokens": tokens} for loss in (model, base))
        return Samples(ours), Samples(theirs)

    return draw


SYNTHETIC = (
    ("accuracy >= -0.01", "1 % lost", labelled(0, 0.01)),
    ("accuracy >= -0.01", "11 % lost, 10 % gained", labelled(0.1, 0.11)),
    ("accuracy >= -0.01", "3 % lost", labelled(0, 0.03)),
    ("accuracy >= -0.2", "20 % lost", labelled(0, 0.2)),
    ("accuracy >= -0.2", "40 % lost", labelled(0, 0.4)),
    ("accuracy >= 98 %", "98 % of the original's", labelled(0, 0.016)),
    ("accuracy >= 98 %", "94 % of the original's", labelled(0, 0.048)),
    ("perplexity <= +2 %", "2 % worse", windows(0.02)),
    ("perplexity <= +2 %", "4 % worse", windows(0.04)),
)


def shifted(base: Samples, other: Samples, change: float) -> Samples:
    """``other`` with a constant added to every token's loss, so that its perplexity is known."""
    tokens, nll = other.columns["tokens"], other.columns["nll_nats"]
    wanted = base.columns["nll_nats"].sum() + tokens.sum() * math.log1p(change)
    constant = (wanted - nll.sum()) / tokens.sum()
    return Samples({**other.columns, "nll_nats": nll + constant * tokens})


def intervals(base: Samples, other: Samples, n: int, seeds: int) -> list[Interval]:
    """The interval of every seed, each of which draws other windows and other resamples."""
    total, found = base.count("perplexity"), []
    for seed in range(seeds):
        rows = np.random.default_rng([seed, n]).integers(0, total, n)
        ours, theirs = (Samples({k: v[rows] for k, v in s.columns.items()}) for s in (other, base))
        found.append(interval("perplexity <= +0 %", ours, theirs, seed))
    return found


def interval(limit: str, ours: Samples, theirs: Samples, seed: int) -> Interval:
    """The interval that the command judges a relative limit by."""
    parsed, how = parse_limit(limit), (DEFAULTS.resamples, DEFAULTS.confidence)
    return interval_of(parsed.metric, number_of(parsed), ours, theirs, *how, seed)


def synthetic(sizes: list[int], seeds: int) -> list[dict[str, str | int]]:
    """Count verdicts on synthetic pairs."""
    rows: list[dict[str, str | int]] = []
    for (limit, truth, draw), n in itertools.product(SYNTHETIC, sizes):
        pairs = (draw(np.random.default_rng([seed, n]), n) for seed in range(seeds))
        judged = (
            judge(parse_limit(limit), interval(limit, *pair, seed)).verdict
            for seed, pair in enumerate(pairs)
        )
        rows.append({"limit": limit, "model": truth, "n": n, **counted(judged)})
    return rows


def counted(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """Count each verdict."""
    counts = Counter(verdicts)
    return {verdict.value: counts[verdict] for verdict in Verdict}


def measured(
    base: Path, same: Path, other: list[Path], sizes: list[int], limits: list[str], seeds: int
) -> list[dict[str, str | int]]:
    """Count verdicts on windows of measured losses."""
    population, unchanged = (read_baseline(path).as_samples() for path in (base, same))
    cases = [("same", unchanged)]
    for path in other:
        cut = read_baseline(path).as_samples()
        for what, change in (("equal", 0.0), ("worse", 0.03)):
            cases.append((f"{what}, {path.stem}", shifted(population, cut, change)))
    rows: list[dict[str, str | int]] = []
    for n, (name, samples) in itertools.product(sizes, cases):
        found = intervals(population, samples, n, seeds)
        for percent in limits:
            limit = parse_limit(f"perplexity <= +{percent} %")
            verdicts = counted(judge(limit, each).verdict for each in found)
            rows.append({"model": name, "n": n, "limit": limit.text, **verdicts})
    return rows


def main(
    base: Annotated[Path | None, typer.Option(help="Baseline of the model.")] = None,
    same: Annotated[Path | None, typer.Option(help="Baseline of it under other numerics.")] = None,
    other: Annotated[
        list[Path] | None, typer.Option(help="Baseline of a cut model (repeatable).")
    ] = None,
    sizes: Annotated[str, typer.Option(help="Sample sizes.")] = "64,128,256",
    limits: Annotated[str, typer.Option(help="Limits, in per cent.")] = "0,1,2",
    seeds: Annotated[int, typer.Option(help="Seeds per row.")] = 1000,
    output: Annotated[Path | None, typer.Option(help="Write the rows as JSON.")] = None,
) -> None:
    """Simulate."""
    start, numbers = time.monotonic(), [int(size) for size in sizes.split(",")]
    if base is None or same is None or not other:
        rows = synthetic(numbers, seeds)
    else:
        rows = measured(base, same, other, numbers, limits.split(","), seeds)
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
