"""The application at the command line. Imports wait until a command needs them."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from headprune import processes, terminal
from headprune._version import __version__
from headprune.commands.listing import listed
from headprune.errors import HeadpruneError


class _Commands(TyperGroup):
    """All commands; the one that runs is imported, and the others are names."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, one in listed().items():
            self.commands[name] = TyperCommand(
                name, help=one.summary, rich_help_panel=one.panel.value, rich_markup_mode="rich"
            )

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Import the command that the words name."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None:
            from headprune.command_line import at_the_command_line
            from headprune.commands.command import named

            command = self.commands[name] = at_the_command_line(named(name))
        return name, command, rest


app = typer.Typer(
    name="headprune",
    cls=_Commands,
    help="Make the attention of Hugging Face models smaller, and verify the result.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
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
    if processes.count() > 1 and context.invoked_subcommand in listed():
        from headprune.commands.command import all_commands

        together = [name for name, one in all_commands().items() if one.together]
        if context.invoked_subcommand not in together:
            raise HeadpruneError(
                f"'{context.invoked_subcommand}' is run by one process, and {processes.count()} "
                f"were started; a launcher is of use for {' and '.join(together)} only."
            )


def main() -> None:
    """Entry point."""
    terminal.run(app)
