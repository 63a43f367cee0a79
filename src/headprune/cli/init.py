"""headprune init."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from headprune.cli import terminal
from headprune.cli.options import Overwrite
from headprune.commands import command


def init(
    recipe: Annotated[
        Path, typer.Argument(help="The file to write.", metavar="RECIPE.yaml")
    ] = Path("recipe.yaml"),
    model: Annotated[str | None, typer.Option(help="A model folder or a hub id.")] = None,
    goal: Annotated[
        str | None,
        typer.Option(
            help="kv-cache: a smaller KV cache. heads: fewer heads. study: which heads matter."
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Text to train on: a file, a folder or a hub id.")
    ] = None,
    test_data: Annotated[
        str | None,
        typer.Option(help="Text to measure on. Default: the test split of a hub id."),
    ] = None,
    hardware: Annotated[str | None, typer.Option(help="Where it runs: cpu or gpu.")] = None,
    output: Annotated[
        str | None, typer.Option(help="The recipe's output folder. Default: of the file's name.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing; take the defaults.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Ask a few questions and write a recipe with comments."""
    from headprune.config import build
    from headprune.pipelines import init as pipeline

    here = "gpu" if shutil.which("nvidia-smi") else "cpu"
    questions = {
        "model": (model, "Model, a folder or a hub id", pipeline.MODEL),
        "goal": (goal, "Goal: kv-cache (a smaller KV cache), heads (fewer) or study", "kv-cache"),
        "data": (data, "Text to train on, a file, a folder or a hub id", pipeline.DATA),
        "hardware": (hardware, "Where it runs: cpu or gpu", here),
    }
    given: dict[str, Any] = {
        name: answer or (default if yes else typer.prompt(question, default=default))
        for name, (answer, question, default) in questions.items()
    }
    if test_data is None and Path(given["data"]).exists() and not yes:
        test_data = typer.prompt("Text to measure on, not trained on")
    given |= {"test_data": test_data, "output": output or recipe.stem}
    written = pipeline.init(recipe, build(pipeline.Answers, given), overwrite)
    terminal.out.print(
        f"{recipe} has the steps {', '.join(written.steps)}. See what they would take, then run "
        f"them:\n\n  {command('run', recipe, dry_run=True)}\n  {command('run', recipe)}",
        soft_wrap=True,
        markup=False,
        emoji=False,
    )
