"""headprune families."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from headprune.cli import terminal
from headprune.cli.options import Json


def families(
    json_: Json = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as Markdown.")
    ] = False,
) -> None:
    """List the supported model families, and what works for each."""
    from headprune.cli import render
    from headprune.families.capabilities import capabilities

    rows = capabilities()
    if json_:
        terminal.show_json(json.dumps([asdict(row) for row in rows], indent=2))
    elif markdown:
        typer.echo(render.families_markdown(rows))
    else:
        render.families(terminal.out, rows)
