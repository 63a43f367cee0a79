"""headprune families."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from headprune.context import Context
from headprune.declaration import Chapter, Command, Options, Panel, declare, option

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.family.capabilities import Capability


class FamiliesOptions(Options):
    """List the supported model families, and what works for each."""

    markdown: bool = option("Print the table as Markdown.", False, Panel.MAIN)


def run(options: FamiliesOptions, context: Context) -> list[Capability]:
    """Reads the table."""
    from headprune.family.capabilities import capabilities

    return capabilities()


def show(rows: list[Capability], options: FamiliesOptions, console: Console) -> None:
    """Prints it."""
    from headprune.render import models

    if options.markdown:
        console.out(models.families_markdown(rows))
    else:
        models.families(console, rows)


def _as_json(rows: list[Capability]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=2)


declare(Command("families", Chapter.CHOOSE, FamiliesOptions, run, show, as_json=_as_json))
