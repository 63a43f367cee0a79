"""headprune clean."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headprune.cli import terminal
from headprune.cli.options import Json
from headprune.errors import HeadpruneError

if TYPE_CHECKING:
    from headprune.pipelines.clean import Cleaned


def clean(
    folder: Annotated[Path, typer.Argument(help="Where to look, and below.", metavar="DIR")],
    yes: Annotated[bool, typer.Option("--yes", help="Remove it without asking.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List it; remove nothing.")] = False,
    json_: Json = False,
) -> None:
    """Remove what runs that were killed left; interrupted trainings stay, and are named.

    The next run of the same command does so by itself for its own output.
    """
    if yes and dry_run:
        raise HeadpruneError("--yes removes and --dry-run does not; give one of them.")
    from headprune.pipelines import clean as pipeline

    found = pipeline.survey(folder)
    if not json_:
        _list(found)
    if found.leftovers and not dry_run and (yes or (not json_ and _asked())):
        found = pipeline.clean(found)
        if not json_:
            terminal.out.print(f"Removed {len(found.leftovers)}.")
    if json_:
        terminal.show_json(json.dumps(found.as_json(), indent=2))


def _list(found: Cleaned) -> None:
    from rich.filesize import decimal
    from rich.markup import escape

    for leftover in found.leftovers:
        size = decimal(leftover.bytes)
        terminal.out.print(
            f"{size:>10}  {escape(str(leftover.path))}  [dim]({leftover.what})[/]", soft_wrap=True
        )
    if found.leftovers:
        terminal.out.print(f"{decimal(found.bytes):>10}  in all")
    else:
        terminal.out.print("No run left anything.")
    for path in found.resumable:
        terminal.out.print(
            f"kept: {escape(str(path))}, an interrupted training that --resume goes on from"
        )


def _asked() -> bool:
    if not sys.stdin.isatty():
        raise HeadpruneError("Nothing was removed: say --yes to remove these, or --dry-run.")
    return typer.confirm("Remove them?")
