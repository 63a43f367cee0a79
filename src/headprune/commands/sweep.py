"""headprune sweep."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, Field

from headprune.commands.shared import (
    DATA,
    NAMED,
    Columns,
    Cutting,
    OneModel,
    Placed,
    Replacing,
    output,
)
from headprune.config import (
    NUMBER,
    CalibrationConfig,
    Count,
    DataConfig,
    Domains,
    EvaluateConfig,
    Names,
    Place,
    RecallConfig,
    data_configs,
)
from headprune.declaration import Chapter, Command, Context, Panel, declare, option
from headprune.tensors.units import Unit

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.schemas.sweeps import Sweep


def _shares(value: object) -> object:
    """Shares between commas."""
    if not isinstance(value, str):
        return value
    try:
        return tuple(float(part) for part in value.split(","))
    except ValueError:
        raise ValueError("give shares between 0 and 1, such as 0.9,0.75,0.5") from None


Share = Annotated[float, Field(ge=0, le=1), NUMBER]
Shares = Annotated[tuple[Share, ...], BeforeValidator(_shares), Field(min_length=1)]


class SweepOptions(OneModel, CalibrationConfig, RecallConfig, Columns, Replacing, Cutting, Placed):
    """Cut a model to several sizes and measure each: the curve of quality against size."""

    data: Place = option(DATA, panel=Panel.MAIN)
    keep: Shares = option(
        "Shares of heads to keep, comma-separated.", (0.9, 0.75, 0.5), Panel.MAIN, as_text=True
    )
    criterion: Names = option("What chooses the heads (repeatable).", ("compensated",), Panel.MAIN)
    test: Domains | None = option(
        f"Data to measure on. {NAMED} Default: that of --data, which flatters a refit.",
        None,
        Panel.MAIN,
    )
    output: Path = output("Folder for table, JSON and plot.")
    refit: bool = option(
        "Whether W_O is refitted to make up for the heads that go.", True, Panel.CUT
    )
    rounds: Count = option("How often heads are scored per cut.", 1, Panel.CUT)
    unit: Unit | None = option(
        "What is removed as one piece. Default: head for MHA, kv-group for GQA.", None, Panel.CUT
    )
    max_windows: Count | None = option(
        "Measure on the first so many windows or examples only.", None, Panel.INPUT
    )
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
    from headprune.evidence.score import Watch

    return sweep(
        options.model,
        options.examples(options.data),
        options.output,
        options.keep,
        options.criterion,
        test=options.tests(),
        refit=options.refit,
        rounds=options.rounds,
        unit=options.unit,
        config=options.part(CalibrationConfig),
        evaluation=options.part(EvaluateConfig, speed=False),
        overwrite=options.overwrite,
        **options.loading(),
        watch=Watch(stage=context.stage, step=context.step),
    )


def show(result: Sweep, options: SweepOptions, console: Console) -> None:
    """Prints the curve as a table."""
    from headprune.console.scores import sweep

    sweep(console, result, options.output)


declare(Command("sweep", Chapter.JUDGE, SweepOptions, run, show))
