"""headprune score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator

from headprune.commands import options as o
from headprune.commands.command import ACCESS, COMMANDS, command
from headprune.commands.listing import Panel
from headprune.config import ScoreConfig, WindowConfig, build
from headprune.config.values import PositiveInt, Seed, listed
from headprune.context import Context

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.schemas.scores import Scores


def _show(console: Console, result: Scores, values: Mapping[str, Any]) -> None:
    from headprune.render import next_commands, results

    output, model = values["output"], str(values["model"])
    given = COMMANDS["score"].again(values, (*ACCESS, "dtype"))
    following = next_commands.after_scores(result, output, model, given)
    results.scores(console, result, output, following)


def _as_json(result: Scores) -> str:
    from headprune.render.results import scores_json

    return scores_json(result)


@command(
    Panel.CHOOSE,
    _show,
    as_json=_as_json,
    needs={
        **dict.fromkeys(("text_column", "label_column"), "data"),
        **dict.fromkeys(("calibration_tokens", "seq_len", "batch_size"), "data|form=window"),
        **dict.fromkeys(("window", "sinks", "context_tokens"), "form=window"),
        **dict.fromkeys(("criterion", "attention"), "form=removed"),
    },
)
def score(
    model: o.Model,
    output: o.Output,
    *,
    form: Annotated[
        Literal["removed", "window"], o.option("Score heads for their removal, or for a window.")
    ] = "removed",
    criterion: Annotated[
        str | Sequence[str],
        BeforeValidator(listed),
        o.option(
            "compensated, gradient, fisher, fluctuation, wanda, reconstruction, magnitude or "
            "random (repeatable)."
        ),
    ] = ("compensated",),
    data: o.Data | None = None,
    text_column: o.TextColumn | None = None,
    label_column: o.LabelColumn | None = None,
    unit: o.FormUnit | None = None,
    window: o.Window | None = None,
    sinks: o.Sinks = 4,
    context_tokens: o.ContextTokens | None = None,
    calibration_tokens: o.Tokens | None = None,
    seq_len: o.SeqLen | None = None,
    batch_size: PositiveInt = 4,
    attention: o.Kinds = (),
    dtype: o.Dtype = "auto",
    seed: Seed = 0,
    overwrite: o.Overwrite = False,
    device: o.Device = "auto",
    placement: o.Placement = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    context: Context = Context(),
) -> Scores:
    """Score every head by one or more criteria, or for a window, without training."""
    from headprune.evidence.score import score

    given = {name: value for name, value in locals().items() if value is not None}
    windows = form == "window"
    config = build(WindowConfig, given) if windows else build(ScoreConfig, given)
    source = o.data_at(data, text_column, label_column)
    return score(model, Path(output), config, source, overwrite, context)
