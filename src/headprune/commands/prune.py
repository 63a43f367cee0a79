"""headprune prune."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator

from headprune.commands import options as o
from headprune.commands.command import ACCESS, COMMANDS, command
from headprune.commands.listing import Panel
from headprune.config import (
    CalibrationConfig,
    DataConfig,
    Dtype,
    Writing,
    build,
)
from headprune.config.data import refuse_missing_file
from headprune.config.values import (
    FractionOrCount,
    Length,
    Names,
    PositiveInt,
    Seed,
    ShardSize,
    Tokens,
    path,
    possible_place,
)
from headprune.context import Context
from headprune.errors import HeadpruneError
from headprune.schemas.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.result.preview import Preview
    from headprune.result.write import Pruned

NO_REFIT = "none"
_BUDGETS = ("max_params", "max_kv_bytes", "keep_roles")
_OF_CHOICE = (
    *("model", "output", "scores", "criterion", "keep", "roles", *_BUDGETS),
    *("dry_run", "save_plan", "overwrite"),
)


def _show(console: Console, result: Pruned | Preview, values: Mapping[str, Any]) -> None:
    from headprune.render import next_commands, results
    from headprune.result.preview import Preview

    given = COMMANDS["prune"].again(values, but=_OF_CHOICE)
    if isinstance(result, Preview):
        saved, following = values["save_plan"], ""
        if saved is not None and result.scored is not None:
            model = str(values["model"])
            following = next_commands.after_plan(result.scored, Path(saved), model, given)
        results.preview(console, result, saved, following)
    else:
        results.pruned(console, result, COMMANDS["prune"].again(values, ACCESS))


@command(
    Panel.CUT,
    _show,
    warnings=lambda result: result.warnings,
    needs={
        "criterion": "scores",
        "keep": "scores|gates",
        **dict.fromkeys(_BUDGETS, "scores"),
        "roles": "keep_roles|dry_run",
        "save_plan": "dry_run",
        **dict.fromkeys(("calibration_tokens", "seq_len", "batch_size", "seed"), "refit|scores"),
        "text_column": "refit",
    },
)
def prune(
    model: o.Model,
    output: o.Output | None = None,
    *,
    gates: Annotated[o.File, o.option("Folder from train-gates.")] | None = None,
    scores: Annotated[o.File, o.option("Folder from score; needs a budget such as --keep.")]
    | None = None,
    plan: Annotated[
        Path | str | Plan,
        BeforeValidator(path),
        o.option("plan.json, or a JSON map from module path to heads to remove.", metavar="PATH"),
    ]
    | None = None,
    keep: Annotated[
        FractionOrCount,
        o.option("Heads to keep: a share (0.75; 1.0 is all) or a count (202; 1 is one)."),
    ]
    | None = None,
    max_params: o.MaxParams | None = None,
    max_kv_bytes: o.MaxKvBytes | None = None,
    criterion: Annotated[str, o.option("Which of several scores.")] | None = None,
    refit: Annotated[
        str | Path,
        BeforeValidator(possible_place),
        o.option("Text to refit W_O on, or none. Default: the text of the scores.", metavar="DATA"),
    ]
    | None = None,
    layout: Annotated[
        Literal["per-layer", "uniform", "ragged", "padded"],
        o.option("uniform: a plain config. ragged: any head. padded: ragged, with zero heads."),
    ] = "per-layer",
    targets: o.Engines = (),
    roles: Annotated[o.File, o.option("Folder from roles: say which roles are lost.")]
    | None = None,
    keep_roles: Annotated[Names, o.option("Roles whose heads all stay, comma-separated.")] = (),
    dry_run: o.DryRun = False,
    save_plan: o.SavePlan | None = None,
    overwrite: o.Overwrite = False,
    text_column: str | None = None,
    calibration_tokens: Tokens | None = None,
    seq_len: Length | None = None,
    batch_size: PositiveInt | None = None,
    dtype: o.Dtype = "auto",
    seed: Seed | None = None,
    out_dtype: o.Dtype = "auto",
    proof: Literal["auto", "outputs", "tensors"] = "auto",
    max_shard_size: ShardSize = "50GB",
    device: o.Device = "auto",
    placement: o.Placement = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    context: Context = Context(),
) -> Pruned | Preview:
    """Remove heads from the weights, verify the result against the gated model, and write it."""
    if output is None and not dry_run:
        raise HeadpruneError("prune needs OUTPUT, the folder to write (or --dry-run).")
    from headprune.planning.choose import CutRequest
    from headprune.result.preview import preview
    from headprune.result.prune import prune

    gates, scores, roles = (_path(each) for each in (gates, scores, roles))
    plan = Path(plan) if isinstance(plan, str) else plan
    output, save_plan = _path(output), _path(save_plan)
    request = build(CutRequest, locals())
    if dry_run or output is None:
        return preview(model, request, Dtype(dtype), save_plan, overwrite, context)
    text, calibration = _refit(refit, text_column, scores, criterion, keep, context)
    sample = {"text_column": text_column, "calibration_tokens": calibration_tokens}
    sample |= {"seq_len": seq_len, "batch_size": batch_size, "seed": seed}
    if text is None and (idle := [name for name, value in sample.items() if value is not None]):
        raise HeadpruneError(
            f"{idle[0]} has no effect, as W_O is not refitted: give --refit DATA, or leave it out."
        )
    calibration = build(
        CalibrationConfig,
        locals(),
        calibration_tokens=calibration_tokens or calibration.calibration_tokens,
        seq_len=seq_len or calibration.seq_len,
        batch_size=batch_size or calibration.batch_size,
        seed=calibration.seed if seed is None else seed,
    )
    writing = build(Writing, locals())
    if context.provenance is not None and text is not None:
        used = {"refit": text.source, "calibration_tokens": calibration.calibration_tokens}
        options = {**context.provenance.options, **used, "seq_len": calibration.seq_len}
        context = replace(context, provenance=replace(context.provenance, options=options))
    return prune(model, output, request, text, calibration, writing, context)


def _path(place: Path | str | None) -> Path | None:
    return None if place is None else Path(place)


def _refit(
    refit: str | Path | None,
    text_column: str | None,
    scores: Path | None,
    criterion: str | None,
    keep: float | None,
    context: Context,
) -> tuple[DataConfig | None, CalibrationConfig]:
    """Return the text of a refit: from the call, or of scores that assume a refit."""
    usual = CalibrationConfig()
    whole = keep == 1 and isinstance(keep, float)
    if refit is not None or scores is None or whole:
        return o.data_at(None if refit == NO_REFIT else refit, text_column), usual
    from headprune.data.read import digest_of_data
    from headprune.evidence.criteria import CRITERIA
    from headprune.schemas.scores import read_scores

    record = read_scores(scores)
    made, name = record.metadata, record.of(criterion)[0]
    if not made.refits or made.data is None or not CRITERIA[name].assumes_refit:
        return None, usual
    why = f"{name} scores assume a refit, and the text that they were made on, "
    try:
        refuse_missing_file(made.data.source)
    except HeadpruneError:
        raise HeadpruneError(
            f"{why}'{made.data.source}', is not here: give --refit DATA, or cut with --refit none "
            "(better by scores of another criterion, such as fisher)."
        ) from None
    if made.data_sha256 not in (None, digest_of_data(made.data)):
        raise HeadpruneError(
            f"{why}'{made.data.source}', has changed: give --refit DATA, or --refit none."
        )
    context.line(
        f"{name} scores assume a refit: it is made on their text, '{made.data.source}' "
        "(--refit none for no refit)"
    )
    return made.data, made.calibration
