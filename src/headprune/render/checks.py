"""Verdicts at a terminal, and for GitHub Actions: a step summary and annotations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from headprune.evaluation.metrics import label
from headprune.io.markup import inert
from headprune.regression.verdicts import Judged, Verdict
from headprune.render.blocks import Block, Paragraph, Table, plural
from headprune.render.markdown import escaped, table
from headprune.render.terminal import show

if TYPE_CHECKING:
    from headprune.regression.baseline import Baseline
    from headprune.regression.check import CheckReport

_MARKS = {Verdict.PASSED: "✅", Verdict.BROKEN: "❌", Verdict.UNDECIDED: "⚠️"}


def checked(console: Console, report: CheckReport) -> None:
    """Print a verdict and a number per limit."""
    level = next((f"{100 * one.confidence:g} % " for one in report.limits if one.confidence), "")
    rows = [
        (
            one.verdict.value,
            one.limit,
            one.number(),
            one.interval(),
            "" if one.n is None else str(one.n),
        )
        for one in report.limits
    ]
    page: list[Block] = [Table(("", "limit", "measured", f"{level}interval", "n"), rows, names=2)]
    for one in report.limits:
        if one.verdict is Verdict.UNDECIDED:
            page.append(Paragraph(f"{one.limit}: {one.advice()}.", "warning"))
    if report.baseline is not None:
        page.append(Paragraph(f"Baseline: {report.baseline}."))
    broken, undecided = (
        sum(one.verdict is verdict for one in report.limits)
        for verdict in (Verdict.BROKEN, Verdict.UNDECIDED)
    )
    counts = f"{plural(len(report.limits), 'limit')}, {broken} broken, {undecided} undecided"
    show(console, [*page, Paragraph(f"{report.model}: {report.verdict.value}: {counts}.")])


def recorded(console: Console, baseline: Baseline, path: str) -> None:
    """Print the numbers of a new baseline."""
    rows = [(label(name), f"{value:.4f}") for name, value in baseline.metrics.items()]
    rows += [(name.replace("_", " "), f"{count:,}") for name, count in baseline.structure.items()]
    rows.append(("load route", baseline.load_route))
    n = max(map(len, baseline.samples.values()))
    words = f"Baseline of {n} windows or examples: {path}."
    show(console, [Table(("", ""), rows), Paragraph(words)])


def step_summary(model: str, judged: Sequence[Judged], verdict: Verdict) -> str:
    """Return a Markdown section with a row per limit."""
    rows = [
        (_MARKS[one.verdict], one.limit, "; ".join(filter(None, (one.found(), one.advice()))))
        for one in judged
    ]
    title = f"### headprune check: {escaped(model)}: {_MARKS[verdict]} {verdict.value}"
    return f"{title}\n\n{table(Table(('', 'limit', 'measured'), rows, names=3))}\n\n"


def workflow_commands(judged: Sequence[Judged]) -> list[str]:
    """Return an error command per limit that did not pass."""
    return [
        annotation("error", one.sentence()) for one in judged if one.verdict is not Verdict.PASSED
    ]


def annotation(level: str, message: str) -> str:
    """Return a workflow command on one line."""
    text = inert(message).replace("%", "%25").replace("\n", "%0A")
    return f"::{level} title=headprune check::{text}"
