"""headprune migrate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headprune.commands.shared import Loading, OneModel, Placed
from headprune.config import COMPUTED, Dtype, Writing
from headprune.context import Context
from headprune.declaration import Chapter, Command, Panel, declare, option

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.exporting.write import Pruned


class MigrateOptions(OneModel, Writing, Loading, Placed):
    """Rewrite a folder whose heads transformers 4 pruned, so that transformers 5 loads it."""

    output: Path = option(
        "Folder for the result.", panel=Panel.OUTPUT, positional=True, metavar="OUT"
    )
    dtype: Dtype = option(COMPUTED, Dtype.AUTO)


def run(options: MigrateOptions, context: Context) -> Pruned:
    """Rewrites it."""
    from headprune.exporting.prune import migrate

    return migrate(
        options.model,
        options.output,
        options.dtype,
        options.part(Writing),
        context,
    )


def show(result: Pruned, options: MigrateOptions, console: Console) -> None:
    """Prints what was written."""
    from headprune.console.results import pruned

    pruned(console, result)


declare(
    Command(
        "migrate",
        Chapter.CUT,
        MigrateOptions,
        run,
        show,
        as_json=lambda result: result.manifest.model_dump_json(indent=2),
        warnings=lambda result: result.warnings,
    ),
)
