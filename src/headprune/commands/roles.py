"""headprune roles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headprune.commands.shared import (
    DATA,
    Columns,
    Loading,
    OneModel,
    Placed,
    output,
)
from headprune.config import Place, Replacing, RolesConfig
from headprune.context import Context
from headprune.declaration import Chapter, Command, Panel, declare, option

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.schemas.roles import RolesRecord


class RolesOptions(OneModel, RolesConfig, Columns, Replacing, Loading, Placed):
    """Say what every head does, such as induction, with controls and intervals."""

    data: Place = option(DATA, panel=Panel.MAIN)
    output: Path = output("Folder for roles.json and its pictures.")
    against: Place | None = option(
        "The original of a cut model: say which roles were kept, lost and moved.",
        None,
        Panel.MAIN,
    )
    card: bool = option(
        "Also write the roles on the model card of MODEL, a result of headprune.",
        False,
        Panel.OUTPUT,
    )


def run(options: RolesOptions, context: Context) -> RolesRecord:
    """Measures them."""
    from headprune.exporting.card import rewrite_card
    from headprune.role.measure import roles
    from headprune.schemas.manifest import read_manifest

    if options.card:
        read_manifest(Path(options.model))  # refuses early what is no result
    record = roles(
        options.model,
        options.output,
        options.examples(options.data),
        options.part(RolesConfig),
        against=options.against,
        overwrite=options.overwrite,
        context=context,
    )
    if options.card:
        rewrite_card(Path(options.model), record=record)
    return record


def show(result: RolesRecord, options: RolesOptions, console: Console) -> None:
    """Prints the table of heads, and a line per role."""
    from headprune.console.roles import roles

    roles(console, result, options.output)


declare(
    Command(
        "roles",
        Chapter.CHOOSE,
        RolesOptions,
        run,
        show,
    ),
)
