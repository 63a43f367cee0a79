"""headprune inspect."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from headprune.commands.shared import DATA, Columns, Loading, OneModel, Placed, of_text
from headprune.config import Place, RanksConfig, Replacing
from headprune.context import Context
from headprune.declaration import Chapter, Command, Panel, declare, option

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.model.inspection import Inspection


class InspectOptions(OneModel, RanksConfig, Columns, Loading, Replacing, Placed):
    """Show a model's attention: heads, head_dim, parameters, KV cache, and what a cut saves."""

    ranks: bool = option(
        "Also measure on --data how many directions every head uses of its head_dim.",
        False,
        Panel.MAIN,
    )
    data: Place | None = option(f"{DATA} Goes with --ranks.", None, Panel.MAIN)
    figure: Path | None = option(
        "With --ranks: also as .svg or .png, a file for values and one for scores.",
        None,
        Panel.OUTPUT,
    )


def run(options: InspectOptions, context: Context) -> Inspection:
    """Measures it."""
    from headprune.model.inspection import inspect

    found = inspect(options.model, context.allowed)
    if options.data is None:
        return found
    from headprune.console.figures import claimed_figures
    from headprune.console.ranks import MEASURES, figures
    from headprune.evidence.ranks import ranks

    data, config = options.examples(options.data), options.part(RanksConfig)
    with ExitStack() as stack:
        files = {}
        if options.figure is not None:
            claim = claimed_figures(options.figure, MEASURES, options.overwrite)
            files = stack.enter_context(claim)
        measured = ranks(options.model, data, config, context)
        figures(measured, files)
    for path in files.values():
        context.line(f"Drawn to {path}.", True)
    return found.model_copy(update={"ranks": measured})


def show(result: Inspection, options: InspectOptions, console: Console) -> None:
    """Prints a table."""
    from headprune.console.models import inspection

    inspection(console, result)


declare(
    Command(
        "inspect",
        Chapter.CHOOSE,
        InspectOptions,
        run,
        show,
        needs={
            "ranks": "data",
            **dict.fromkeys(("data", "figure", *RanksConfig.model_fields), "ranks"),
            **of_text("ranks"),
            "overwrite": "figure",
        },
    )
)
