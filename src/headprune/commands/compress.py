"""headprune compress."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from headprune.commands.shared import (
    DATA,
    Columns,
    Loading,
    OneModel,
    Placed,
    of_text,
    output,
    refuse_healing_by_layers,
)
from headprune.config import AnyDomains, CompressConfig, Replacing
from headprune.context import Context
from headprune.declaration import Chapter, Command, Panel, declare, option
from headprune.errors import HeadpruneError

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.compression.compress import Compressed, Outline


class CompressOptions(OneModel, CompressConfig, Columns, Replacing, Loading, Placed):
    """Make a model smaller in the best known way, judged on text that nothing was fitted to."""

    data: AnyDomains = option(
        DATA + " Repeatable, also named, as in wiki=a.txt: they are mixed evenly. Default: text "
        "that ships with headprune.",
        (),
        Panel.MAIN,
    )
    output: Path | None = output("Folder for the result; not needed with --dry-run.", None)
    dry_run: bool = option("Say what would be made and measured, write nothing.", False, Panel.MAIN)


def run(options: CompressOptions, context: Context) -> Compressed | Outline:
    """Compresses, or says how."""
    if options.output is None and not options.dry_run:
        raise HeadpruneError("compress needs --output, the folder to write (or --dry-run).")
    if options.heal_steps is not None:
        refuse_healing_by_layers(options)
    from headprune.compression.compress import compress

    return compress(
        options.model,
        None if options.dry_run else options.output,
        options.part(CompressConfig),
        options.domains(options.data),
        options.overwrite,
        context,
    )


def show(result: Compressed | Outline, options: CompressOptions, console: Console) -> None:
    """Prints what was chosen, and what the alternatives would have cost."""
    from headprune.compression.compress import Outline
    from headprune.render import compressed

    if isinstance(result, Outline):
        compressed.outline(console, result)
    else:
        compressed.compressed(console, result)


def _warnings(result: Compressed | Outline) -> Iterable[str]:
    pruned = getattr(result, "pruned", None)
    return () if pruned is None else pruned.warnings


declare(
    Command(
        "compress",
        Chapter.CUT,
        CompressOptions,
        run,
        show,
        warnings=_warnings,
        needs=of_text("data"),
    ),
)
