"""headprune report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator

from headprune.commands.shared import output
from headprune.config import Replacing
from headprune.context import Context
from headprune.declaration import Chapter, Command, Panel, declare, option

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.render.report import Reported


def _listed(value: object) -> object:
    return [value] if isinstance(value, str | Path) else value


class ReportOptions(Replacing):
    """Report on runs: heads, quality, memory, speed, verification and provenance, on one page."""

    runs: Annotated[tuple[Path, ...], BeforeValidator(_listed)] = option(
        "Folders of runs: results, gates, scores, or folders that hold several of them and reports "
        "of evaluate; or such reports.",
        panel=Panel.INPUT,
        positional=True,
        metavar="RUN...",
    )
    output: Path = output("The page to write (.html), or a summary for a pull request (.md).")


def run(options: ReportOptions, context: Context) -> Reported:
    """Writes the page."""
    from headprune.render.report import report

    context.stage("drawing")
    return report(options.runs, options.output, options.overwrite)


def show(result: Reported, options: ReportOptions, console: Console) -> None:
    """Prints what is on it."""
    from rich.markup import escape

    for one in result.runs:
        console.print(f"[bold]{escape(one.name)}[/]: {escape(one.summary)}")
    console.print(f"Written to {escape(str(options.output))}.")


declare(Command("report", Chapter.JUDGE, ReportOptions, run, show))
