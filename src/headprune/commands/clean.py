"""headprune clean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headprune.declaration import Chapter, Command, Context, Options, Panel, declare, option
from headprune.errors import HeadpruneError

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.io.leftovers import Cleaned


class CleanOptions(Options):
    """Remove what runs that were killed left; interrupted trainings stay, and are named.

    The next run of the same command does so by itself for its own output.
    """

    folder: Path = option(
        "Where to look, and below.", panel=Panel.INPUT, positional=True, metavar="DIR"
    )
    yes: bool = option("Remove it without asking.", False, Panel.MAIN)
    dry_run: bool = option("List it; remove nothing.", False, Panel.MAIN)


def run(options: CleanOptions, context: Context) -> Cleaned:
    """Finds what was left, and removes it if that was asked for or is agreed to."""
    if options.yes and options.dry_run:
        raise HeadpruneError("--yes removes and --dry-run does not; give one of them.")
    from headprune.io import leftovers

    found = leftovers.survey(options.folder)
    if not found.leftovers or options.dry_run:
        return found
    if options.yes:
        return leftovers.clean(found)
    if context.confirm is None or not context.confirm(found.lines(), "Remove them?"):
        return found
    return leftovers.clean(found)


def show(result: Cleaned, options: CleanOptions, console: Console) -> None:
    """Prints what was found, and what became of it."""
    for line in (f"Removed {len(result.leftovers)}.",) if result.removed else result.lines():
        console.print(line, soft_wrap=True, markup=False)


declare(Command("clean", Chapter.JOBS, CleanOptions, run, show))
