"""headprune heal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headprune import devices
from headprune.commands.shared import (
    DATA,
    Columns,
    Cutting,
    OneModel,
    Placed,
    output,
)
from headprune.config import HealConfig, HealTrain, Place, Resuming
from headprune.declaration import (
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
from headprune.errors import HeadpruneError
from headprune.placements import Placement

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.distillation.heal import Healed
    from headprune.estimates import Estimate, Sizes


class HealOptions(OneModel, HealConfig, Columns, Resuming, Cutting, Placed):
    """Train a cut or converted model to match the model it came from, on plain text."""

    teacher: Place = option(
        "The model it came from: a folder or a hub id.", panel=Panel.MAIN, slot=Slot.MODEL
    )
    data: Place = option(DATA, panel=Panel.MAIN, slot=Slot.DATA)
    output: Path = output("Folder for the result.")
    shard: bool = option(
        "Split both models over the processes that torchrun started, so that each holds a part of "
        "every layer.",
        False,
        Panel.TRAINING,
        in_recipes=False,
    )


def run(options: HealOptions, context: Context) -> Healed:
    """Trains it."""
    from headprune.distillation.heal import heal

    if options.placement is Placement.LAYERS and not options.by_layer:
        raise HeadpruneError(
            "--placement layers: training holds the whole model, but for --by-layer. Give that, or "
            "leave out --placement."
        )
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
    from headprune.console.results import healed

    healed(console, result)


def _summary(result: Healed) -> str:
    return (
        f"divergence {result.before:.4f} before, {result.after:.4f} after {result.taken_after} of "
        f"{result.steps} steps, verified"
    )


def _estimate(options: HealOptions, sizes: Sizes) -> Estimate:
    from dataclasses import replace

    trained = {
        HealTrain.ATTENTION: sizes.attention_parameters,
        HealTrain.LORA: 0,
        HealTrain.ALL: sizes.parameters,
    }[options.train]
    batch = options.batch_size * options.seq_len
    half = options.bf16 and devices.computes_bfloat16() and not options.by_layer
    teacher = sizes.parameters * (2 if half else 4)
    tokens = float(options.steps * batch)
    needs = sizes.training(tokens, batch, trained, 4, options.gradient_checkpointing, teacher)
    stored = sizes.stored(options.out_dtype)
    if not options.by_layer:
        return replace(needs, disk_bytes=needs.disk_bytes + stored)
    # both streams of all text, and a layer that is trained
    held = (2 * 4 * int(tokens) + 16 * 4 * batch) * sizes.hidden + 16 * trained // sizes.layers
    return replace(
        needs,
        disk_bytes=4 * trained + stored,
        memory_bytes=needs.weights_bytes + held,
        layers_bytes=sizes.by_layers(needs.weights_bytes) + held,
    )


declare(
    Command(
        "heal",
        Chapter.CUT,
        HealOptions,
        run,
        show,
        warnings=lambda result: result.pruned.warnings,
        together=True,
        step=InRecipe(
            Made.MODEL,
            _summary,
            _estimate,
            defaults={"data": "train", "teacher": "original"},
            resumes=True,
        ),
    ),
)
