"""headprune prune."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headprune.commands.shared import Columns, Loading, OneModel, Placed, of_text, output
from headprune.config import (
    CalibrationConfig,
    Kept,
    LayoutOption,
    Place,
    Targeted,
    Writing,
    one_or_all,
)
from headprune.context import Context, MadeBy
from headprune.declaration import Chapter, Command, Panel, declare, option
from headprune.errors import HeadpruneError
from headprune.schemas.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.exporting.preview import Preview
    from headprune.exporting.write import Pruned

_REFITS = "refit | scores & !no_refit"
_AS_SCORED = ("calibration_tokens", "seq_len")  # of a refit, as the scores reckon with it


class PruneOptions(OneModel, CalibrationConfig, Targeted, Columns, Writing, Loading, Placed):
    """Remove heads from the weights, verify the result against the gated model, and write it."""

    gates: Path | None = option("Folder from train-gates.", None, Panel.MAIN)
    scores: Path | None = option("Folder from score; needs --keep.", None, Panel.MAIN)
    plan: Path | Plan | None = option(
        "plan.json, or a JSON map from module path to the heads to remove, as "
        '{"model.layers.0.self_attn": [0, 3]}.',
        None,
        Panel.MAIN,
        metavar="PATH",
    )
    keep: Kept | None = option(
        "Share (1.0 is all) or count (1 is one) of heads to keep: with --scores, or another than "
        "the gates were trained for.",
        None,
        Panel.MAIN,
        note=one_or_all,
    )
    refit: Place | None = option(
        "Refit W_O by least squares on this text, layer after layer, so that the heads that stay "
        "make up for those that go. Default: the text of scores that reckon with a refit.",
        None,
        Panel.MAIN,
        metavar="DATA",
    )
    no_refit: bool = option("Cut without a refit, whatever the scores reckon with.", False)
    output: Path | None = output("Folder for the result; not needed with --dry-run.", None)
    dry_run: bool = option("Show the plan, write nothing.", False, Panel.MAIN)
    roles: Path | None = option(
        "With --dry-run: folder from roles, or its roles.json; say which roles the plan loses.",
        None,
        Panel.CUT,
    )
    criterion: str | None = option("Which of the scores, if there are several.", None, Panel.CUT)
    layout: LayoutOption = option(
        "per-layer: other counts in every layer, equal groups within a layer. uniform: the same "
        "counts everywhere, so that a plain config holds the result. ragged: any head, also where "
        "that leaves KV heads with unequal numbers of queries. padded: the same, for engines that "
        "know no such groups and no layer without heads: zero heads, which compute nothing, make "
        "the groups equal and fill those layers.",
        LayoutOption.PER_LAYER,
        Panel.CUT,
    )


def run(options: PruneOptions, context: Context) -> Pruned | Preview:
    """Cuts, or says what would be cut."""
    if options.output is None and not options.dry_run:
        raise HeadpruneError("prune needs --output, the folder to write (or --dry-run).")
    from headprune.exporting.preview import preview
    from headprune.exporting.prune import prune
    from headprune.planning.from_evidence import CutRequest

    asked = CutRequest(**{each.name: getattr(options, each.name) for each in fields(CutRequest)})
    if options.output is None or options.dry_run:
        return preview(options.model, asked, options.dtype, options.roles, context.allowed)
    output, options = options.output, _as_scored(options, context)
    return prune(
        options.model,
        output,
        asked,
        options.source(options.refit),
        options.part(CalibrationConfig),
        options.part(Writing),
        replace(context, made_by=MadeBy.of("prune", options)),
    )


def _as_scored(options: PruneOptions, context: Context) -> PruneOptions:
    """The options with the refit that scores reckon with, on the text that they were made on."""
    whole = options.keep == 1 and isinstance(options.keep, float)
    if options.scores is None or options.refit or options.no_refit or whole:
        return options
    from headprune.data.read import digest_of_data, refuse_missing_file
    from headprune.evidence.criteria import CRITERIA
    from headprune.schemas.scores import read_scores

    scores = read_scores(options.scores)
    made, criterion = scores.metadata, scores.of(options.criterion)[0]
    if not CRITERIA[criterion].assumes_refit or not made.refits or made.data is None:
        return options
    try:
        refuse_missing_file(made.data.source)
    except HeadpruneError:
        raise HeadpruneError(
            f"{criterion} scores reckon with a refit, and the text that they were made on, "
            f"'{made.data.source}', is not here: give --refit DATA, or cut with --no-refit (better "
            "by scores of another criterion, such as fisher)."
        ) from None
    if made.data_sha256 not in (None, digest_of_data(made.data)):
        raise HeadpruneError(
            f"{criterion} scores reckon with a refit, and '{made.data.source}' holds another text "
            "here than when they were made: give --refit DATA, or cut with --no-refit."
        )
    context.line(
        f"{criterion} scores reckon with a refit: it is made on their text, '{made.data.source}' "
        "(--no-refit for none)"
    )
    used = {name: getattr(made.calibration, name) for name in _AS_SCORED}
    asked = {name: getattr(options, name) for name in options.model_fields_set}
    text = made.data.model_dump(exclude={"source"})
    return PruneOptions(**{**used, **text, **asked, "refit": made.data.source})


def show(result: Pruned | Preview, options: PruneOptions, console: Console) -> None:
    """Prints what was cut, or would be."""
    from headprune.console import results
    from headprune.exporting.preview import Preview

    if isinstance(result, Preview):
        results.preview(console, result)
    else:
        results.pruned(console, result)


declare(
    Command(
        "prune",
        Chapter.CUT,
        PruneOptions,
        run,
        show,
        warnings=lambda result: getattr(result, "warnings", ()),
        needs={
            "criterion": "scores",
            "keep": "scores | gates",
            "no_refit": "scores & !refit",
            "roles": "dry_run",
            **of_text(_REFITS),
            **dict.fromkeys((*_AS_SCORED, "batch_size", "seed"), _REFITS),
        },
    ),
)
