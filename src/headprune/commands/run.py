"""headprune run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headprune.commands.shared import Placed, Trust
from headprune.config import Names
from headprune.declaration import Chapter, Command, Context, Panel, declare, option

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.recipes.forecast import Forecast
    from headprune.recipes.run import Run


class RunOptions(Trust, Placed):
    """Run the whole job of a recipe; steps that are done already are not done again."""

    recipe: Path = option(
        "A recipe; 'headprune init' writes one.",
        panel=Panel.INPUT,
        positional=True,
        metavar="RECIPE.yaml",
    )
    settings: Names = option(
        "Another value for a setting, such as steps.heal.steps=300 (repeatable).",
        (),
        Panel.MAIN,
        flags="--set",
        metavar="KEY=VALUE",
    )
    dry_run: bool = option(
        "List the steps with time, memory by where they run, and disk; run nothing.",
        False,
        Panel.MAIN,
    )


def run(options: RunOptions, context: Context) -> Run | Forecast:
    """Runs it, or says what it would take."""
    from headprune.recipes.reading import read_recipe

    recipe = read_recipe(options.recipe, options.settings)
    if options.dry_run:
        from headprune.recipes.forecast import forecast

        return forecast(recipe, options.trust_remote_code)
    from headprune.recipes.run import run

    return run(recipe, context, options.trust_remote_code)


def show(result: Run | Forecast, options: RunOptions, console: Console) -> None:
    """Prints step by step."""
    from headprune.console import runs
    from headprune.recipes.run import Run

    if isinstance(result, Run):
        runs.finished(console, result)
    else:
        runs.forecast(console, result)


declare(
    Command(
        "run",
        Chapter.JOBS,
        RunOptions,
        run,
        show,
        warnings=lambda result: getattr(result, "warnings", ()),
        passed=lambda result: getattr(result, "passed", True),
    )
)
