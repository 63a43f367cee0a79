"""headprune heal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headprune.commands.shared import (
    DATA,
    Columns,
    Loading,
    OnDevice,
    OneModel,
    output,
)
from headprune.config import HealConfig, Place, Resuming
from headprune.context import Context
from headprune.declaration import Chapter, Command, Panel, declare, option

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.distillation.heal import Healed


class HealOptions(OneModel, HealConfig, Columns, Resuming, Loading, OnDevice):
    """Train a cut or converted model to match the model it came from, on plain text."""

    teacher: Place = option("The model it came from: a folder or a hub id.", panel=Panel.MAIN)
    data: Place = option(DATA, panel=Panel.MAIN)
    output: Path = output("Folder for the result.")
    shard: bool = option(
        "Split both models over the processes that torchrun started, so that each holds a part of "
        "every layer.",
        False,
        Panel.TRAINING,
    )


def run(options: HealOptions, context: Context) -> Healed:
    """Trains it."""
    from headprune.distillation.heal import heal

    return heal(
        options.model,
        options.teacher,
        options.examples(options.data),
        options.output,
        options.part(HealConfig),
        options.part(Resuming),
        context,
    )


def show(result: Healed, options: HealOptions, console: Console) -> None:
    """Prints how near it came."""
    from headprune.render.results import healed

    healed(console, result)


declare(
    Command(
        "heal",
        Chapter.CUT,
        HealOptions,
        run,
        show,
        warnings=lambda result: result.pruned.warnings,
        needs={"lora_rank": "train=lora"},
        together=True,
    ),
)
