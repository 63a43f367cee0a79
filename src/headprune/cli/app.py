"""The application at the command line. Heavy imports wait until a command runs."""

from __future__ import annotations

from typing import Annotated

import typer

from headprune import processes
from headprune._version import __version__
from headprune.cli import terminal
from headprune.cli.adapter import add
from headprune.declaration import COMMANDS, Command
from headprune.errors import HeadpruneError

app = typer.Typer(
    name="headprune",
    help="Make the attention of Hugging Face models smaller, and verify the result.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"headprune {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    processes.refuse_without_launcher()
    asked = str(context.invoked_subcommand)
    if processes.count() > 1 and asked in COMMANDS and not COMMANDS[asked].together:
        together = " and ".join(name for name in COMMANDS if COMMANDS[name].together)
        raise HeadpruneError(
            f"'{asked}' is run by one process, and {processes.count()} were started; a launcher is "
            f"of use for {together} only."
        )


for _command in Command.listed():
    add(app, _command)


def main() -> None:
    """Entry point."""
    terminal.run(app)
