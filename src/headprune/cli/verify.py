"""headprune verify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from headprune.cli import terminal
from headprune.cli.options import Json, Trust


def verify(
    folder: Annotated[
        Path, typer.Argument(help="A folder that headprune wrote.", metavar="FOLDER")
    ],
    against: Annotated[
        str | None,
        typer.Option(help="The model it was made from: compare with its gated form in full."),
    ] = None,
    json_: Json = False,
    trust_remote_code: Trust = False,
) -> None:
    """Prove a result again: hashes, load routes, and outputs against those that were stored."""
    terminal.quiet_libraries()
    from headprune.cli import render
    from headprune.pipelines.verify import verify as pipeline

    with terminal.stages() as on_stage:
        result = pipeline(folder, against, trust_remote_code, on_stage)
    if json_:
        terminal.show_json(json.dumps(result.as_json(), indent=2))
    else:
        render.verification(terminal.out, result)
    if not result.passed:
        raise typer.Exit(1)
