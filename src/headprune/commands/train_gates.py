"""headprune train-gates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headprune.commands.shared import DATA, Columns, Cutting, OnDevice, OneModel, output
from headprune.config import Place, Resuming, Train, TrainGatesConfig
from headprune.declaration import (
    Allowed,
    Chapter,
    Command,
    Context,
    InRecipe,
    Made,
    Panel,
    Slot,
    declare,
    option,
)

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.estimates import Estimate, Sizes
    from headprune.gates.train_gates import GatesRun


class TrainGatesOptions(OneModel, TrainGatesConfig, Columns, Resuming, Cutting, OnDevice):
    """Train a gate on every head, towards an exact number of heads."""

    data: Place = option(DATA, panel=Panel.MAIN, slot=Slot.DATA)
    output: Path = output("Folder for the gates.")
    shard: bool = option(
        "Split the model over the processes that torchrun started, so that each holds a part of "
        "every layer.",
        False,
        Panel.TRAINING,
        in_recipes=False,
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
    from headprune.console import next_commands, results

    allowed = Allowed.by(options)
    following = next_commands.after_gates(result, options.model, options.dtype, allowed)
    results.gates_run(console, result, following)


def _estimate(options: TrainGatesOptions, sizes: Sizes) -> Estimate:
    from headprune.estimates import tokens_in

    trained = {
        Train.GATES: 0,
        Train.CHANNELS: 0,  # but for a factor per column of W_O
        Train.ATTENTION: sizes.attention_parameters,
        Train.ALL: sizes.parameters,
    }[options.train]
    batch, here = options.batch_size * options.seq_len, tokens_in(options.data)
    tokens = None if here is None else options.epochs * here
    if options.steps is not None:
        tokens = float(options.steps * batch)
    itemsize = sizes.computed_itemsize(options.dtype)
    return sizes.training(tokens, batch, trained, itemsize, options.gradient_checkpointing)


def _summary(result: GatesRun) -> str:
    made = result.metadata
    return f"gates of {made.kept_heads} of {made.query_heads} heads stay open"


declare(
    Command(
        "train-gates",
        Chapter.CHOOSE,
        TrainGatesOptions,
        run,
        show,
        as_json=lambda result: result.metadata.model_dump_json(indent=2),
        together=True,
        step=InRecipe(Made.GATES, _summary, _estimate, defaults={"data": "train"}, resumes=True),
    ),
)
