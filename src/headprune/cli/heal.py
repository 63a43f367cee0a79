"""headprune heal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from headprune import config as cfg
from headprune.cli import terminal
from headprune.cli.options import (
    Assume,
    Data,
    Drop,
    GradientCheckpointing,
    Json,
    Model,
    OutDtype,
    Output,
    Overwrite,
    Resume,
    SaveEvery,
    Seed,
    SeqLen,
    Split,
    StepBatch,
    TextColumn,
    Trust,
    data_config,
)

if TYPE_CHECKING:
    from headprune.training.resumable import TrainingStep

_HEAL = cfg.HealConfig(steps=1)  # for its other settings


def heal(
    model: Model,
    teacher: Annotated[str, typer.Option(help="The model it came from: a folder or a hub id.")],
    data: Data,
    output: Output,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")],
    train: Annotated[cfg.HealTrain, typer.Option(help="What is trained.")] = _HEAL.train,
    lora_rank: Annotated[int, typer.Option(help="With --train lora: its rank.")] = _HEAL.lora_rank,
    batch_size: StepBatch = _HEAL.batch_size,
    seq_len: SeqLen = _HEAL.seq_len,
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate.")] = (
        _HEAL.learning_rate
    ),
    bf16: Annotated[
        bool, typer.Option("--bf16", help="Compute in bfloat16; weights stay in float32.")
    ] = False,
    gradient_checkpointing: GradientCheckpointing = False,
    out_dtype: OutDtype = _HEAL.out_dtype,
    seed: Seed = _HEAL.seed,
    save_every: SaveEvery = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    split: Split = "train",
    text_column: TextColumn = None,
    json_: Json = False,
    trust_remote_code: Trust = False,
    assume_supported: Assume = False,
    drop_unexpected: Drop = False,
) -> None:
    """Train a cut or converted model to match the model it came from, on plain text."""
    config = cfg.build(
        cfg.HealConfig,
        {
            "steps": steps,
            "train": train,
            "lora_rank": lora_rank,
            "batch_size": batch_size,
            "seq_len": seq_len,
            "learning_rate": learning_rate,
            "bf16": bf16,
            "gradient_checkpointing": gradient_checkpointing,
            "out_dtype": out_dtype,
            "seed": seed,
            "save_every": save_every,
        },
    )
    source = data_config(data, split, text_column, None)
    terminal.quiet_libraries()
    from headprune.cli import render
    from headprune.pipelines.heal import heal as pipeline

    with terminal.bar() as bar:

        def on_step(record: TrainingStep) -> None:
            bar.step(record.step, record.steps, f"divergence {record.loss:.4f}")

        result = pipeline(
            model,
            teacher,
            source,
            output,
            config,
            resume=resume,
            overwrite=overwrite,
            trust_remote_code=trust_remote_code,
            assume_supported=assume_supported,
            drop_unexpected=drop_unexpected,
            on_step=on_step,
            on_stage=bar.stage,
        )
    terminal.warn(result.pruned.warnings)
    if json_:
        terminal.show_json(json.dumps(result.as_json(), indent=2))
    else:
        render.healed(terminal.out, result)
