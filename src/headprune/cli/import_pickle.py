"""headprune import-pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from headprune.cli import terminal
from headprune.cli.options import Json, Overwrite


def import_pickle(
    model: Annotated[
        str,
        typer.Argument(help="A model folder with pickled weights, or a hub id.", metavar="MODEL"),
    ],
    output: Annotated[Path, typer.Argument(help="Folder for the result.", metavar="OUT")],
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Make safetensors of a model's pickled weights; no code of theirs runs."""
    terminal.quiet_libraries()
    from headprune.cli import render
    from headprune.pipelines.import_pickle import import_pickle as pipeline

    with terminal.stages() as on_stage:
        result = pipeline(model, output, overwrite, on_stage)
    if json_:
        terminal.show_json(json.dumps(result.as_json(), indent=2))
    else:
        render.imported(terminal.out, result)
