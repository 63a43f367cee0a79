"""headprune run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from headprune.cli import terminal
from headprune.cli.options import Json, Trust
from headprune.recipe import read_recipe

RecipeFile = Annotated[
    Path, typer.Argument(help="A recipe; 'headprune init' writes one.", metavar="RECIPE.yaml")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Another value for a setting, such as steps.heal.steps=300 (repeatable).",
    ),
]


def run(
    recipe: RecipeFile,
    set_: Settings = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="List the steps with time, memory and disk; run nothing."),
    ] = False,
    json_: Json = False,
    trust_remote_code: Trust = False,
) -> None:
    """Run the whole job of a recipe; steps that are done already are not done again."""
    asked = read_recipe(recipe, set_ or ())
    terminal.quiet_libraries()
    from headprune.cli import render_run
    from headprune.pipelines import forecast
    from headprune.pipelines.run import run as pipeline
    from headprune.pipelines.steps import Watch

    if dry_run:
        outlook = forecast.forecast(asked, trust_remote_code)
        if json_:
            terminal.show_json(json.dumps(outlook.as_json(), indent=2))
        else:
            render_run.forecast(terminal.out, outlook)
        return
    with terminal.bar() as bar:
        name = ""

        def on_step(step: str, cached: bool) -> None:
            nonlocal name
            name = step
            if cached:
                render_run.step_line(terminal.err, step, "done before", True, None)

        finished = pipeline(
            asked,
            Watch(
                on_step=on_step,
                on_stage=lambda stage: bar.stage(f"{name}: {stage}"),
                on_progress=bar.step,
                on_done=lambda *done: render_run.step_line(terminal.err, *done),
            ),
            trust_remote_code,
        )
    if json_:
        terminal.show_json(json.dumps(finished.as_json(), indent=2))
    else:
        render_run.finished(terminal.out, finished)
    if not finished.passed:
        raise typer.Exit(1)
