"""headprune train-gates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headprune.commands.shared import DATA, Columns, Cutting, OnDevice, OneModel, output
from headprune.config import (
    CalibrationConfig,
    Method,
    Place,
    Resuming,
    Train,
    TrainGatesConfig,
)
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
    settings = (tokens, batch, trained, itemsize, options.gradient_checkpointing)
    might = sizes.causal and options.leaves_method
    if options.method is not Method.REFIT and not might:
        return sizes.training(*settings)
    # heads are chosen and W_O refitted before, in float32; then the original, which has a W_O of
    # its own, runs beside the model
    outputs, sample = sizes.attention_parameters // 4, CalibrationConfig().calibration_tokens
    training = sizes.training(*settings, teacher=outputs * itemsize)
    held = sizes.calibration(sample, "float32", streams=2)
    fitting = sizes.computed("float32") + held
    seconds, before = training.seconds, 5 * sizes.forward(sample)
    return replace(
        training,
        seconds=None if seconds is None else seconds + before,
        memory_bytes=max(training.memory_bytes, fitting),
        disk_bytes=training.disk_bytes + 2 * outputs * itemsize,
    )


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
