"""headprune export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headprune.commands.shared import Trust, model, output
from headprune.config import ExportConfig, Place, Replacing
from headprune.context import Context
from headprune.declaration import Chapter, Command, declare

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.formats.export import Exported


class ExportOptions(Replacing, Trust, ExportConfig):
    """Write a model for an engine (llama.cpp, vLLM), proven there or by reading it back."""

    model: Place = model(metavar="FOLDER")
    output: Path = output("Folder for the result.")


def run(options: ExportOptions, context: Context) -> Exported:
    """Writes and proves it."""
    from headprune.formats.export import export

    return export(
        options.model,
        options.output,
        options.part(ExportConfig),
        options.overwrite,
        context,
    )


def show(result: Exported, options: ExportOptions, console: Console) -> None:
    """Prints what was written, and how it was proven."""
    from headprune.console.results import exported

    exported(console, result)


declare(
    Command(
        "export",
        Chapter.SERVE,
        ExportOptions,
        run,
        show,
        needs={"like": "to=gguf"},
    ),
)
