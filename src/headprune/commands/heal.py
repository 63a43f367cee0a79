"""headprune heal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator

from headprune.commands import options as o
from headprune.commands.command import ACCESS, COMMANDS, command
from headprune.commands.listing import Panel
from headprune.config import HealConfig, Resuming, build
from headprune.config.data import Loss, data_config
from headprune.config.values import Length, Positive, PositiveInt, Seed, Steps, possible_place
from headprune.context import Context

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.distillation.heal import Healed


def _show(console: Console, result: Healed, values: Mapping[str, Any]) -> None:
    from headprune.render.results import healed

    healed(console, result, COMMANDS["heal"].again(values, ACCESS))


@command(
    Panel.CUT,
    _show,
    warnings=lambda result: result.pruned.warnings,
    needs={"lora_rank": "train=lora"},
    together=True,
)
def heal(
    model: o.Model,
    output: o.Output,
    *,
    teacher: Annotated[
        str | Path, BeforeValidator(possible_place), o.option("The model it came from.")
    ],
    data: o.Data,
    loss: o.Loss = "all",
    steps: o.Steps,
    train: Annotated[
        Literal["attention", "lora", "all"], o.option("Weights to train.", panel=o.TRAINING)
    ] = "all",
    batch_size: PositiveInt | None = None,
    seq_len: Length | None = None,
    learning_rate: Positive | None = None,
    report_to: o.ReportTo = "none",
    shard: bool = False,
    out_dtype: o.Dtype = "auto",
    resume: o.Resume = False,
    overwrite: o.Overwrite = False,
    text_column: str | None = None,
    label_column: str | None = None,
    objective: Literal["auto", "distill", "lm+distill"] = "auto",
    optimizer: Literal["auto", "muon", "adamw"] = "auto",
    lora_rank: PositiveInt = 16,
    bf16: bool = True,
    gradient_checkpointing: bool = False,
    sink_logits: bool = True,
    seed: Seed = 0,
    save_every: Steps | None = None,
    device: o.Device = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    context: Context = Context(),
) -> Healed:
    """Train a cut or converted model to match the model it came from, on plain text."""
    from headprune.distillation.heal import heal

    config = build(HealConfig, locals())
    source = data_config(data, text_column, label_column, loss=Loss(loss))
    resuming = Resuming(overwrite=overwrite, resume=resume)
    return heal(model, teacher, source, Path(output), config, resuming, context)
