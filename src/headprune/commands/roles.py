"""headprune roles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headprune.commands.shared import (
    DATA,
    Columns,
    Cutting,
    OneModel,
    Placed,
    Replacing,
    output,
)
from headprune.config import Names, Place, RolesConfig
from headprune.declaration import Chapter, Command, Context, Panel, Slot, declare, option

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.schemas.roles import RolesRecord


class RolesOptions(OneModel, RolesConfig, Columns, Replacing, Cutting, Placed):
    """Say what every head does, such as induction, with controls and intervals."""

    data: Place = option(DATA, panel=Panel.MAIN, slot=Slot.DATA)
    output: Path = output("Folder for roles.json and its pictures.")
    against: Place | None = option(
        "The original of a cut model: say which roles were kept, lost and moved.",
        None,
        Panel.MAIN,
        slot=Slot.MODEL,
    )
    attention: Names = option(
        "Only this kind of attention, for encoder-decoders: encoder, decoder or cross "
        "(repeatable).",
        (),
        Panel.MAIN,
    )


def run(options: RolesOptions, context: Context) -> RolesRecord:
    """Measures them."""
    from headprune.evidence.score import Watch
    from headprune.role.roles import roles

    return roles(
        options.model,
        options.output,
        options.examples(options.data),
        options.part(RolesConfig),
        against=options.against,
        attention=options.attention,
        overwrite=options.overwrite,
        watcher=Watch(stage=context.stage, step=context.step),
        **options.loading(),
    )


def show(result: RolesRecord, options: RolesOptions, console: Console) -> None:
    """Prints the table of heads, and a line per role."""
    from headprune.console.roles import roles

    roles(console, result, options.output)


declare(Command("roles", Chapter.CHOOSE, RolesOptions, run, show))
