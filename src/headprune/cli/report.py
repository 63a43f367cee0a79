"""headprune report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from headprune.cli import terminal
from headprune.cli.options import Json, Overwrite


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs: results, gates, scores, or folders that hold several of them "
            "and reports of evaluate; or such reports.",
            metavar="RUN...",
        ),
    ],
    output: Annotated[Path, typer.Option(help="The page to write (.html), or Markdown (.md).")],
    figures: Annotated[
        Path | None, typer.Option(help="Folder for all figures, as PNG and SVG files.")
    ] = None,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Show runs: heads, quality, memory, speed, proof and provenance, on one page."""
    terminal.quiet_libraries()
    from rich.markup import escape

    from headprune.pipelines.report import report as pipeline

    done = pipeline(runs, output, figures, overwrite)
    if json_:
        terminal.show_json(json.dumps(done.as_json(), indent=2))
        return
    for run in done.runs:
        terminal.out.print(f"[bold]{escape(run.name)}[/]: {escape(run.asked)}")
    beside = f", {len(done.figures)} figures to {escape(str(figures))}" if figures else ""
    terminal.out.print(f"Written to {escape(str(output))}{beside}.")
