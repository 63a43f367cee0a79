"""Verdicts as a table for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from headprune.console.tables import table
from headprune.evaluation.metrics import label
from headprune.regression.verdicts import Verdict

if TYPE_CHECKING:
    from headprune.regression.baseline import Baseline
    from headprune.regression.check import CheckReport

_STYLES = {Verdict.PASSED: "green", Verdict.BROKEN: "bold red", Verdict.UNDECIDED: "yellow"}


def checked(console: Console, report: CheckReport) -> None:
    """Limit by limit: what was asked, what was found."""
    level = next((f"{100 * one.confidence:g} % " for one in report.limits if one.confidence), "")
    grid = table("", "limit", "found", f"{level}interval", "n", numbers_from=2)
    for one in report.limits:
        verdict = Text(one.verdict.value, _STYLES[one.verdict])
        n = "" if one.n is None else str(one.n)
        grid.add_row(verdict, escape(one.limit), escape(one.number()), one.interval(), n)
    console.print(grid)
    for one in report.limits:
        if one.verdict is Verdict.UNDECIDED:
            console.print(f"[yellow]warning:[/] {escape(one.limit)}: {one.advice()}.")
    if report.baseline is not None:
        commit = f", commit {report.baseline_commit[:12]}" if report.baseline_commit else ""
        console.print(f"Baseline: {escape(report.baseline)}{commit}.")
    broken, undecided = (
        sum(one.verdict is which for one in report.limits)
        for which in (Verdict.BROKEN, Verdict.UNDECIDED)
    )
    outcome = Text(report.verdict.value, _STYLES[report.verdict]).markup
    console.print(
        f"{escape(report.model)}: {outcome}: {len(report.limits)} "
        f"limit{'s' if len(report.limits) > 1 else ''}, {broken} broken, {undecided} undecided."
    )


def recorded(console: Console, baseline: Baseline, path: str) -> None:
    """What a new baseline holds."""
    grid = table("", "")
    for name, value in baseline.metrics.items():
        grid.add_row(escape(label(name)), f"{value:.4f}")
    for name, count in baseline.structure.items():
        grid.add_row(name.replace("_", " "), f"{count:,}")
    grid.add_row("load route", baseline.load_route)
    console.print(grid)
    where = f"commit {baseline.commit[:12]}" if baseline.commit else "no git commit"
    dirty = ", with changed files" if baseline.dirty else ""
    n = max(map(len, baseline.samples.values()))
    console.print(f"Baseline of {n} windows or examples ({where}{dirty}): {escape(path)}.")
