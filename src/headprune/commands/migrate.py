"""headprune migrate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headprune.commands.shared import (
    Cutting,
    OneModel,
    Placed,
    Replacing,
    Streamed,
    made_by,
)
from headprune.config import COMPUTED, WRITTEN, Dtype
from headprune.declaration import Chapter, Command, Context, Panel, declare, option

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.exporting.publish import Pruned


class MigrateOptions(OneModel, Streamed, Replacing, Cutting, Placed):
    """Rewrite a folder whose heads transformers 4 pruned, so that transformers 5 loads it."""

    output: Path = option(
        "Folder for the result.", panel=Panel.OUTPUT, positional=True, metavar="OUT"
    )
    dtype: Dtype = option(COMPUTED, Dtype.AUTO)
    out_dtype: Dtype = option(WRITTEN, Dtype.AUTO, Panel.OUTPUT)


def run(options: MigrateOptions, context: Context) -> Pruned:
    """Rewrites it."""
    from headprune.exporting.prune import migrate

    return migrate(
        options.model,
        options.output,
        overwrite=options.overwrite,
        dtype=options.dtype,
        out_dtype=options.out_dtype,
        **options.loading(),
        on_stage=context.stage,
        on_tensor=context.step,
        proof=options.proof,
        max_shard_size=options.max_shard_size,
        made_by=made_by("migrate", options),
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
