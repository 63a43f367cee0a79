"""headprune import-pickle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headprune.config import Place, Replacing
from headprune.declaration import Chapter, Command, Context, Panel, declare, option

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.pickles.import_pickle import Imported


class ImportPickleOptions(Replacing):
    """Make safetensors of a model's pickled weights; no code of theirs runs."""

    model: Place = option(
        "A model folder with pickled weights, or a hub id.",
        panel=Panel.INPUT,
        positional=True,
        metavar="MODEL",
    )
    output: Path = option(
        "Folder for the result.", panel=Panel.OUTPUT, positional=True, metavar="OUT"
    )


def run(options: ImportPickleOptions, context: Context) -> Imported:
    """Reads them in a process without rights, and writes them."""
    from headprune.pickles.import_pickle import import_pickle

    return import_pickle(options.model, options.output, options.overwrite, context.stage)


def show(result: Imported, options: ImportPickleOptions, console: Console) -> None:
    """Prints what was written."""
    from headprune.console.results import imported

    imported(console, result)


declare(Command("import-pickle", Chapter.CUT, ImportPickleOptions, run, show))
