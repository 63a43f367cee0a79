"""headprune train-gates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from headprune.commands import options as o
from headprune.commands.command import ACCESS, COMMANDS, command
from headprune.commands.listing import Panel
from headprune.config import Resuming, TrainGatesConfig, build
from headprune.config.data import Loss, data_config
from headprune.config.values import (
    FractionOrCount,
    Length,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Seed,
    Steps,
    Tokens,
)
from headprune.context import Context

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.gates.train_gates import GatesRun


def _show(console: Console, result: GatesRun, values: Mapping[str, Any]) -> None:
    from headprune.render import next_commands, results

    given = COMMANDS["train-gates"].again(values, (*ACCESS, "dtype"))
    following = next_commands.after_gates(result, str(values["model"]), given)
    results.gates_run(console, result, following)


@command(
    Panel.CHOOSE,
    _show,
    as_json=lambda result: result.metadata.model_dump_json(indent=2),
    needs={
        **dict.fromkeys(("keep_full", "window", "sinks", "context_tokens"), "form=window"),
        **dict.fromkeys(("target_heads", "l0_penalty", "train", "attention"), "form=removed"),
        "weight_lr": "train=attention|train=all",
        "init_log_alpha": "l0_penalty",
        "calibration_tokens": "target_heads|form=window",
    },
    together=True,
)
def train_gates(
    model: o.Model,
    output: o.Output,
    *,
    data: o.Data,
    text_column: o.TextColumn | None = None,
    label_column: o.LabelColumn | None = None,
    loss: o.Loss = "all",
    form: Annotated[
        Literal["removed", "window"], o.option("Fate of a head whose gate closes.")
    ] = "removed",
    target_heads: Annotated[
        FractionOrCount,
        o.option("Heads to keep: a share (0.75; 1.0 is all) or a count (202; 1 is one)."),
    ]
    | None = None,
    keep_full: o.KeepFull | None = None,
    window: o.Window | None = None,
    context_tokens: o.ContextTokens | None = None,
    steps: o.Steps = 100,
    unit: o.FormUnit | None = None,
    train: Annotated[
        Literal["gates", "attention", "all"],
        o.option("Weights to train beside the gates.", panel=o.TRAINING),
    ] = "gates",
    sinks: NonNegativeInt = 4,
    l0_penalty: Positive | None = None,
    batch_size: PositiveInt | None = None,
    seq_len: Length | None = None,
    calibration_tokens: Tokens = 16_384,
    gate_lr: Positive = 0.08,
    weight_lr: Positive = 5e-5,
    temperature: Positive = 2 / 3,
    init_log_alpha: float = 3.0,
    gradient_checkpointing: bool = False,
    attention: o.Kinds = (),
    dtype: o.Dtype = "auto",
    seed: Seed = 0,
    save_every: Steps | None = None,
    report_to: o.ReportTo = "none",
    shard: bool = False,
    resume: o.Resume = False,
    overwrite: o.Overwrite = False,
    device: o.Device = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    context: Context = Context(),
) -> GatesRun:
    """Train gates that decide which heads stay, an exact number of them."""
    from headprune.gates.train_gates import train_gates

    config = build(TrainGatesConfig, locals())
    source = data_config(data, text_column, label_column, loss=Loss(loss))
    resuming = Resuming(overwrite=overwrite, resume=resume)
    return train_gates(model, source, Path(output), config, resuming, context)
