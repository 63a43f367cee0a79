"""headprune sweep."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headprune.commands.shared import (
    DATA,
    NAMED,
    Columns,
    Loading,
    OneModel,
    Placed,
    output,
)
from headprune.config import (
    DataConfig,
    Domains,
    Place,
    Replacing,
    SweepConfig,
    data_configs,
)
from headprune.context import Context
from headprune.declaration import Chapter, Command, Panel, declare, option

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.schemas.sweeps import Sweep


class SweepOptions(OneModel, SweepConfig, Columns, Replacing, Loading, Placed):
    """Cut a model to several sizes and measure each: the curve of quality against size."""

    data: Place = option(DATA, panel=Panel.MAIN)
    test: Domains | None = option(
        f"Data to measure on. {NAMED} Default: that of --data, which flatters a refit.",
        None,
        Panel.MAIN,
    )
    output: Path = output("Folder for table, JSON and plot.")
    test_split: str = option("Split of --test, from the hub.", "test", Panel.INPUT)
    test_text_column: str | None = option(
        "Text column of --test; two, comma-separated, for pairs.", None, Panel.INPUT
    )
    test_label_column: str | None = option("Label or score column of --test.", None, Panel.INPUT)

    def tests(self) -> dict[str, DataConfig] | None:
        """What is measured on, where that is other data."""
        if self.test is None:
            return None
        shared = DataConfig(
            source="",
            split=self.test_split,
            text_column=self.test_text_column or self.text_column,
            label_column=self.test_label_column or self.label_column,
        )
        return data_configs(self.test, shared)


def run(options: SweepOptions, context: Context) -> Sweep:
    """Cuts and measures."""
    from headprune.evaluation.sweep import sweep

    return sweep(
        options.model,
        options.examples(options.data),
        options.output,
        options.part(SweepConfig),
        options.tests(),
        options.overwrite,
        context,
    )


def show(result: Sweep, options: SweepOptions, console: Console) -> None:
    """Prints the curve as a table."""
    from headprune.render.scores import sweep

    sweep(console, result, options.output)


declare(
    Command(
        "sweep",
        Chapter.JUDGE,
        SweepOptions,
        run,
        show,
        needs=dict.fromkeys(("test_split", "test_text_column", "test_label_column"), "test"),
    )
)
