"""headprune score."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headprune.commands.shared import Columns, Cutting, Placed, model, output
from headprune.config import Place, Replacing, ScoreConfig
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
from headprune.errors import HeadpruneError

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.estimates import Estimate, Sizes
    from headprune.schemas.scores import Scores


class ScoreOptions(ScoreConfig, Columns, Replacing, Cutting, Placed):
    """Score every head by one or more criteria, without training."""

    model: Place | None = model(None, "[MODEL]")
    data: Place | None = option(
        "Text (or labelled examples) that shows what the heads do.",
        None,
        Panel.MAIN,
        slot=Slot.DATA,
    )
    gates: Path | None = option(
        "With --criterion gates: folder from train-gates.", None, Panel.INPUT, slot=Slot.GATES
    )
    output: Path | None = output("Folder for the scores.", None)
    show: Path | None = option(
        "Draw the scores of this folder instead.", None, Panel.OUTPUT, in_recipes=False
    )
    figure: Path | None = option(
        "With --show: also as .svg or .png, a file per criterion.",
        None,
        Panel.OUTPUT,
        in_recipes=False,
    )


def run(options: ScoreOptions, context: Context) -> Scores:
    """Scores, or reads scores to be shown."""
    if options.show is not None:
        return _drawn(options, options.show, context)
    if options.model is None or options.output is None:
        raise HeadpruneError("score needs a MODEL and --output, the folder for the scores.")
    if options.figure is not None:
        raise HeadpruneError("--figure goes with --show DIR, which draws scores.")
    from headprune.evidence.score import score

    return score(
        options.model,
        options.output,
        options.part(ScoreConfig),
        options.source(options.data),
        options.gates,
        options.overwrite,
        context,
    )


def _drawn(options: ScoreOptions, folder: Path, context: Context) -> Scores:
    if options.model is not None or options.output is not None:
        raise HeadpruneError("--show draws a scores folder: leave out MODEL and --output.")
    from headprune.console.scores import figures
    from headprune.schemas.scores import read_scores

    found = read_scores(folder)
    if options.figure is not None:
        for path in figures(found, options.figure, options.overwrite):
            context.line(f"Drawn to {path}.", True)
    return found


def show(result: Scores, options: ScoreOptions, console: Console) -> None:
    """Prints the ranks, and the command that cuts by them."""
    from headprune.console import next_commands, scores

    if options.model is None or options.output is None:
        scores.heat_maps(console, result)
        return
    allowed = Allowed.by(options)
    following = next_commands.after_scores(result, options.output, options.model, allowed)
    scores.scores(console, result, options.output, following)


def _as_json(result: Scores) -> str:
    from headprune.console.scores import scores_json

    return scores_json(result)


def _estimate(options: ScoreOptions, sizes: Sizes) -> Estimate:
    """Forward and backward over the calibration text."""
    from headprune.estimates import OVERHEAD_SECONDS, RECORD_BYTES, Estimate
    from headprune.evidence.score import needs_of

    batch = options.tokens_per_pass
    tokens = options.calibration_tokens if options.data else 0
    seconds = OVERHEAD_SECONDS + 2 * sizes.forward(tokens)
    weights, itemsize = sizes.computed(options.dtype), sizes.computed_itemsize(options.dtype)
    at_once = sizes.calibration(
        tokens if "gram" in needs_of(options.criterion) else 0, options.dtype
    )
    held = max(at_once, sizes.activations(batch, itemsize, trained=True))
    of_a_layer = max(at_once, sizes.activations(batch, itemsize, trained=False))
    layers = sizes.by_layers(weights) + of_a_layer
    return Estimate(seconds, weights + held, RECORD_BYTES, weights, layers)


def _refuse(options: ScoreOptions) -> None:
    from headprune.evidence.score import needs_of

    needs_of(options.criterion)


def _summary(result: Scores) -> str:
    return f"scores by {', '.join(result.scores)}"


declare(
    Command(
        "score",
        Chapter.CHOOSE,
        ScoreOptions,
        run,
        show,
        as_json=_as_json,
        step=InRecipe(Made.SCORES, _summary, _estimate, defaults={"data": "train"}, refuse=_refuse),
    ),
)
