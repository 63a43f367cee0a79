"""headprune train-gates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headprune import config as cfg
from headprune.cli import terminal
from headprune.cli.options import (
    Assume,
    AttentionKinds,
    Data,
    Drop,
    DtypeOption,
    GradientCheckpointing,
    HeadsToKeep,
    Json,
    LabelColumn,
    Model,
    Overwrite,
    Resume,
    SaveEvery,
    Seed,
    SeqLen,
    Split,
    StepBatch,
    TextColumn,
    Trust,
    UnitOption,
    data_config,
    settings_read_by,
    share_or_count,
)

if TYPE_CHECKING:
    from headprune.training.trainer import GateStep

_GATES = cfg.TrainGatesConfig.model_construct()


def train_gates(
    model: Model,
    data: Data,
    output: Annotated[Path, typer.Option(help="Folder for the gates.")],
    target_heads: HeadsToKeep = None,
    l0_penalty: Annotated[
        float | None,
        typer.Option(help="Instead of a target: Voita's constant penalty per open head."),
    ] = None,
    attention: AttentionKinds = None,
    unit: UnitOption = None,
    method: Annotated[
        cfg.Method,
        typer.Option(
            help="How heads are chosen. l0: hard-concrete gates. cheapest: gates are plain "
            "factors, and what costs the loss least goes, a few heads at a time."
        ),
    ] = _GATES.method,
    train: Annotated[
        cfg.Train,
        typer.Option(
            help="What is trained beside the gates. channels: a factor per channel of what enters "
            "W_O, with weights frozen."
        ),
    ] = (_GATES.train),
    objective: Annotated[
        cfg.Objective,
        typer.Option(help="The loss. distill needs no labels: it matches the ungated model."),
    ] = _GATES.objective,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.")] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the data, without --steps.")] = (
        _GATES.epochs
    ),
    batch_size: StepBatch = _GATES.batch_size,
    seq_len: SeqLen = _GATES.seq_len,
    gate_lr: Annotated[
        float, typer.Option(help="Learning rate of gates that are drawn (l0).")
    ] = _GATES.gate_lr,
    scale_lr: Annotated[
        float, typer.Option(help="Learning rate of the factors of heads and channels.")
    ] = _GATES.scale_lr,
    weight_lr: Annotated[float, typer.Option(help="Learning rate of the weights.")] = (
        _GATES.weight_lr
    ),
    temperature: Annotated[float, typer.Option(help="beta of the hard-concrete gates (l0).")] = (
        _GATES.temperature
    ),
    rounds: Annotated[
        int | None,
        typer.Option(help="How often heads are chosen. Default: one per quarter of all heads."),
    ] = None,
    warmup: Annotated[
        float, typer.Option(help="Share of a round's choosing in which its target is reached.")
    ] = _GATES.warmup,
    settle: Annotated[
        float | None,
        typer.Option(
            help="Share of every round, at its end, with its heads chosen. Default: 0.6, and 0.3 "
            "with --method cheapest."
        ),
    ] = None,
    gradient_checkpointing: GradientCheckpointing = False,
    dtype: DtypeOption = _GATES.dtype,
    init_log_alpha: Annotated[
        float, typer.Option(help="Where drawn gates start (l0); 3 is open nearly always.")
    ] = _GATES.init_log_alpha,
    seed: Seed = _GATES.seed,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            is_eager=True,
            callback=settings_read_by(cfg.read_train_gates),
            help="YAML with settings, such as the config.yaml of an earlier run; options given "
            "here win.",
        ),
    ] = None,
    save_every: SaveEvery = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    split: Split = "train",
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    json_: Json = False,
    trust_remote_code: Trust = False,
    assume_supported: Assume = False,
    drop_unexpected: Drop = False,
) -> None:
    """Train a gate on every head, towards an exact number of heads."""
    config = cfg.build(
        cfg.TrainGatesConfig,
        {
            "target_heads": share_or_count(target_heads, "--target-heads"),
            "l0_penalty": l0_penalty,
            "attention": attention or (),
            "unit": unit,
            "method": method,
            "train": train,
            "objective": objective,
            "steps": steps,
            "epochs": epochs,
            "batch_size": batch_size,
            "seq_len": seq_len,
            "gate_lr": gate_lr,
            "scale_lr": scale_lr,
            "weight_lr": weight_lr,
            "temperature": temperature,
            "init_log_alpha": init_log_alpha,
            "rounds": rounds,
            "warmup": warmup,
            "settle": settle,
            "gradient_checkpointing": gradient_checkpointing,
            "dtype": dtype,
            "seed": seed,
            "save_every": save_every,
        },
    )
    source = data_config(data, split, text_column, label_column)
    terminal.quiet_libraries()
    from headprune.cli import next_commands, render
    from headprune.pipelines.train_gates import train_gates as pipeline

    with terminal.bar() as bar:

        def on_step(record: GateStep) -> None:
            bar.step(record.step, record.steps, render.step_numbers(record))

        run = pipeline(
            model,
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
    if json_:
        terminal.show_json(run.metadata.model_dump_json(indent=2))
    else:
        following = next_commands.after_gates(
            run,
            model,
            dtype,
            trust_remote_code=trust_remote_code,
            assume_supported=assume_supported,
            drop_unexpected=drop_unexpected,
        )
        render.gates_run(terminal.out, run, following)
