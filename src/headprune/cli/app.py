"""The commands. Heavy imports wait until a command runs, so that --help is immediate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from headprune._version import __version__
from headprune.cli import terminal
from headprune.cli.check import check
from headprune.cli.clean import clean
from headprune.cli.convert_gqa import convert_gqa
from headprune.cli.evaluate import evaluate
from headprune.cli.families import families
from headprune.cli.heal import heal
from headprune.cli.import_pickle import import_pickle
from headprune.cli.init import init
from headprune.cli.inspect import inspect
from headprune.cli.migrate import migrate
from headprune.cli.plan import plan
from headprune.cli.prune import prune
from headprune.cli.report import report
from headprune.cli.run import run
from headprune.cli.score import score
from headprune.cli.sweep import sweep
from headprune.cli.train_gates import train_gates
from headprune.cli.verify import verify
from headprune.errors import HeadpruneError
from headprune.training import processes

app = typer.Typer(
    name="headprune",
    help="Make the attention of Hugging Face models smaller: train gates, cut heads, prove it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

_TOGETHER = ("train-gates", "heal")  # what several processes can do


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"headprune {__version__}")
        raise typer.Exit
    if processes.count() > 1 and context.invoked_subcommand not in _TOGETHER:
        raise HeadpruneError(
            f"'{context.invoked_subcommand}' is run by one process, and {processes.count()} were "
            f"started; a launcher is of use for {' and '.join(_TOGETHER)} only."
        )


# in the order in which --help lists them
_COMMANDS: dict[str, Callable[..., None]] = {
    "inspect": inspect,
    "families": families,
    "train-gates": train_gates,
    "prune": prune,
    "convert-gqa": convert_gqa,
    "heal": heal,
    "migrate": migrate,
    "import-pickle": import_pickle,
    "verify": verify,
    "evaluate": evaluate,
    "score": score,
    "plan": plan,
    "sweep": sweep,
    "report": report,
    "check": check,
    "run": run,
    "init": init,
    "clean": clean,
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(_command)


def main() -> None:
    """Entry point."""
    terminal.run(app)
