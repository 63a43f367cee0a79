"""headprune train-gates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headprune.commands.shared import DATA, Columns, Loading, OnDevice, OneModel, output
from headprune.config import (
    Place,
    Resuming,
    TrainGatesConfig,
)
from headprune.context import Allowed, Context
from headprune.declaration import Chapter, Command, Panel, declare, option

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.gates.train_gates import GatesRun


class TrainGatesOptions(OneModel, TrainGatesConfig, Columns, Resuming, Loading, OnDevice):
    """Train a gate on every head, towards an exact number of heads."""

    data: Place = option(DATA, panel=Panel.MAIN)
    output: Path = output("Folder for the gates.")
    shard: bool = option(
        "Split the model over the processes that torchrun started, so that each holds a part of "
        "every layer.",
        False,
        Panel.TRAINING,
    )


def run(options: TrainGatesOptions, context: Context) -> GatesRun:
    """Trains them."""
    from headprune.gates.train_gates import train_gates

    return train_gates(
        options.model,
        options.examples(options.data),
        options.output,
        options.part(TrainGatesConfig),
        options.part(Resuming),
        context,
    )


def show(result: GatesRun, options: TrainGatesOptions, console: Console) -> None:
    """Prints what stays, and the command that cuts the rest."""
    from headprune.render import next_commands, results

    allowed = Allowed.by(options)
    following = next_commands.after_gates(result, options.model, options.dtype, allowed)
    results.gates_run(console, result, following)


declare(
    Command(
        "train-gates",
        Chapter.CHOOSE,
        TrainGatesOptions,
        run,
        show,
        as_json=lambda result: result.metadata.model_dump_json(indent=2),
        needs={
            **dict.fromkeys(
                ("gate_lr", "temperature", "init_log_alpha", "finetune_fraction"), "!method=refit"
            ),
            "sparsity_warmup": "!method=refit & target_heads",
            "weight_lr": "train=attention | train=all",
            "epochs": "!steps",
        },
        together=True,
    ),
)
