"""headprune report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from headprune.commands import options as o
from headprune.commands.command import command
from headprune.commands.listing import Panel
from headprune.config.values import several
from headprune.context import Context

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.render.report import Reported


def _show(console: Console, result: Reported, values: Mapping[str, Any]) -> None:
    from rich.markup import escape

    for run in result.runs:
        console.print(f"[bold]{escape(run.name)}[/]: {escape(run.summary)}")
    console.print(f"Written to {escape(str(values['output']))}.")


@command(Panel.JUDGE, _show, config=False)
def report(
    runs: Annotated[
        Path | str | Sequence[Path | str],
        BeforeValidator(several),
        o.argument("RUN...", "Results, and their gates, scores, roles and evaluations."),
    ],
    output: Annotated[o.File, o.argument("OUTPUT", "The page (.html) to write.")],
    *,
    overwrite: o.Overwrite = False,
    context: Context = Context(),
) -> Reported:
    """Report on results: heads, quality, memory, speed, proof and provenance, on one page."""
    from headprune.render.report import report

    context.stage("drawing")
    folders = [runs] if isinstance(runs, str | Path) else runs
    return report(tuple(map(Path, folders)), Path(output), overwrite)
