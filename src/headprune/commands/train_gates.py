"""headprune train-gates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from headprune.commands import options as o
from headprune.commands.command import ACCESS, COMMANDS, command
from headprune.commands.listing import Panel
from headprune.config import Resuming, TrainGatesConfig, build
from headprune.config.data import Loss, data_config
from headprune.config.values import Fraction, FractionOrCount, Positive, PositiveInt, Seed, Steps
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
    target_heads: Annotated[
        FractionOrCount,
        o.option("Heads to keep: a share (0.75; 1.0 is all) or a count (202; 1 is one)."),
    ]
    | None = None,
    steps: o.Steps | None = None,
    unit: o.Unit | None = None,
    method: Annotated[
        Literal["auto", "refit", "l0"],
        o.option("refit: scores, refit of W_O, trained factors. l0: hard-concrete gates."),
    ] = "auto",
    train: Annotated[
        Literal["gates", "attention", "all"],
        o.option("Weights to train beside the gates.", panel=o.TRAINING),
    ] = "gates",
    objective: Literal["auto", "lm", "mlm", "distill", "lm+distill", "task"] = "auto",
    l0_penalty: Positive | None = None,
    batch_size: PositiveInt = 4,
    seq_len: o.TrainSeqLen = 256,
    epochs: Positive = 1.0,
    gate_lr: Positive = 0.5,
    scale_lr: Positive = 0.02,
    weight_lr: Positive = 5e-5,
    temperature: Positive = 2 / 3,
    init_log_alpha: float = 3.0,
    sparsity_warmup: Fraction = 0.75,
    finetune_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.6,
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
    from headprune.proof.twins import refuse_unproven

    config = build(TrainGatesConfig, locals())
    source = data_config(data, text_column, label_column, loss=Loss(loss))
    resuming = Resuming(overwrite=overwrite, resume=resume)
    return train_gates(
        model, source, Path(output), config, resuming, context, refuse=refuse_unproven
    )
