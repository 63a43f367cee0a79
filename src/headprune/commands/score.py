"""headprune score."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headprune.commands.shared import Columns, Loading, Placed, model, of_text, output
from headprune.config import Place, Replacing, ScoreConfig
from headprune.context import Allowed, Context
from headprune.declaration import Chapter, Command, Panel, declare, option
from headprune.errors import HeadpruneError

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.schemas.scores import Scores


class ScoreOptions(ScoreConfig, Columns, Replacing, Loading, Placed):
    """Score every head by one or more criteria, without training."""

    model: Place | None = model(None, "[MODEL]")
    data: Place | None = option(
        "Text (or labelled examples) that shows what the heads do.",
        None,
        Panel.MAIN,
    )
    gates: Path | None = option(
        "With --criterion gates: folder from train-gates.", None, Panel.INPUT
    )
    output: Path | None = output("Folder for the scores.", None)
    show: Path | None = option("Draw the scores of this folder instead.", None, Panel.OUTPUT)


def run(options: ScoreOptions, context: Context) -> Scores:
    """Scores, or reads scores to be shown."""
    if options.show is not None:
        from headprune.schemas.scores import read_scores

        return read_scores(options.show)
    if options.model is None or options.output is None:
        raise HeadpruneError("score needs a MODEL and --output, the folder for the scores.")
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


def show(result: Scores, options: ScoreOptions, console: Console) -> None:
    """Prints the ranks, and the command that cuts by them."""
    from headprune.render import next_commands, scores

    if options.model is None or options.output is None:
        scores.heat_maps(console, result)
        return
    allowed = Allowed.by(options)
    following = next_commands.after_scores(result, options.output, options.model, allowed)
    scores.scores(console, result, options.output, following)


def _as_json(result: Scores) -> str:
    from headprune.render.scores import scores_json

    return scores_json(result)


declare(
    Command(
        "score",
        Chapter.CHOOSE,
        ScoreOptions,
        run,
        show,
        as_json=_as_json,
        needs={
            **dict.fromkeys(ScoreOptions.model_fields.keys() - {"show"}, "!show"),
            **of_text("data"),
            **dict.fromkeys(("calibration_tokens", "seq_len", "batch_size"), "data"),
            "gates": "criterion=gates",
            "overwrite": "output",
        },
    ),
)
