"""The result for GitHub Actions: a step summary in Markdown, and annotations."""

from __future__ import annotations

import html
from collections.abc import Sequence

from headprune.io.markup import inert, xml_safe
from headprune.regression.verdicts import Judged, Verdict

_MARKS = {Verdict.PASSED: "✅", Verdict.BROKEN: "❌", Verdict.UNDECIDED: "⚠️"}


def step_summary(model: str, judged: Sequence[Judged], verdict: Verdict) -> str:
    """Return a Markdown section with one row per limit."""
    lines = [
        f"### headprune check: {_cell(model)}: {_MARKS[verdict]} {verdict.value}",
        "",
        "| | limit | measured |",
        "|---|---|---|",
    ]
    for one in judged:
        measured = "; ".join(filter(None, (one.found(), one.advice())))
        lines.append(f"| {_MARKS[one.verdict]} | {_cell(one.limit)} | {_cell(measured)} |")
    return "\n".join(lines) + "\n\n"


def workflow_commands(judged: Sequence[Judged]) -> list[str]:
    """Return an error annotation per limit that does not hold for sure."""
    return [
        annotation("error", one.sentence()) for one in judged if one.verdict is not Verdict.PASSED
    ]


def annotation(level: str, message: str) -> str:
    """Return one workflow command; a line break in the message would end it, so it is escaped."""
    escaped = inert(message).replace("%", "%25").replace("\n", "%0A")
    return f"::{level} title=headprune check::{escaped}"


def _cell(text: str) -> str:
    for sign in "\\`*_[]|~#":
        text = text.replace(sign, f"\\{sign}")
    return html.escape(xml_safe(" ".join(text.split())), quote=False)
