"""headprune init."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headprune.config import Place, Replacing
from headprune.declaration import Chapter, Command, Context, Panel, build, declare, option
from headprune.io.shell import command

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.recipes.recipe import Recipe


class InitOptions(Replacing):
    """Ask a few questions and write a recipe with comments."""

    recipe: Path = option(
        "The file to write.",
        Path("recipe.yaml"),
        Panel.OUTPUT,
        positional=True,
        metavar="RECIPE.yaml",
    )
    model: Place | None = option("A model folder or a hub id.", None, Panel.MAIN)
    goal: str | None = option(
        "kv-cache: a smaller KV cache. heads: fewer heads. study: which heads matter.",
        None,
        Panel.MAIN,
    )
    data: Place | None = option("Text to train on: a file, a folder or a hub id.", None, Panel.MAIN)
    test_data: Place | None = option(
        "Text to measure on. Default: the test split of a hub id.", None, Panel.MAIN
    )
    hardware: str | None = option("Where it runs: cpu or gpu.", None, Panel.MAIN)
    output: Place | None = option(
        "The recipe's output folder. Default: of the file's name.", None, Panel.MAIN
    )
    yes: bool = option("Ask nothing; take the defaults.", False, Panel.MAIN)


def run(options: InitOptions, context: Context) -> Recipe:
    """Asks for what was not given, and writes the recipe."""
    from headprune.recipes import init

    here = "gpu" if shutil.which("nvidia-smi") else "cpu"
    questions = {
        "model": ("Model, a folder or a hub id", init.MODEL),
        "goal": ("Goal: kv-cache (a smaller KV cache), heads (fewer) or study", "kv-cache"),
        "data": ("Text to train on, a file, a folder or a hub id", init.DATA),
        "hardware": ("Where it runs: cpu or gpu", here),
    }
    ask = None if options.yes else context.ask
    given: dict[str, Any] = {
        name: getattr(options, name) or (ask(question, default) if ask else default)
        for name, (question, default) in questions.items()
    }
    test = options.test_data
    if test is None and ask and Path(given["data"]).exists():
        test = ask("Text to measure on, not trained on", None)
    given |= {"test_data": test, "output": options.output or options.recipe.stem}
    return init.init(options.recipe, build(init.Answers, given), options.overwrite)


def show(result: Recipe, options: InitOptions, console: Console) -> None:
    """Prints the commands that run it."""
    file = options.recipe
    console.print(
        f"{file} has the steps {', '.join(result.steps)}. See what they would take, then run "
        f"them:\n\n  {command('run', file, dry_run=True)}\n  {command('run', file)}",
        soft_wrap=True,
        markup=False,
        emoji=False,
    )


def _as_json(result: Recipe) -> str:
    return json.dumps(result.model_dump(mode="json"), indent=2)


declare(Command("init", Chapter.JOBS, InitOptions, run, show, as_json=_as_json))
