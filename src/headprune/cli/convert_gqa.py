"""headprune convert-gqa."""

from __future__ import annotations

import json
import shutil
from typing import Annotated

import typer

from headprune import config as cfg
from headprune.cli import terminal
from headprune.cli.heal import heal
from headprune.cli.options import (
    Assume,
    AttentionKinds,
    CalibrationTokens,
    Drop,
    DtypeOption,
    Json,
    Model,
    OutDtype,
    Output,
    Overwrite,
    Seed,
    SeqLen,
    Split,
    TextColumn,
    Trust,
    data_config,
    kv_head_counts,
)
from headprune.errors import HeadpruneError

_CONVERT = cfg.ConvertConfig.model_construct()
_HEAL = cfg.HealConfig(steps=1)  # for its other settings


def convert_gqa(
    model: Model,
    output: Output,
    kv_heads: Annotated[
        str | None,
        typer.Option(
            help="KV heads per layer: one number, a comma-separated list with one per attention "
            "module, or a JSON file with such a list."
        ),
    ] = None,
    kv_budget: Annotated[
        float | None,
        typer.Option(help="Instead: the share of all KV heads to keep, spread over the layers."),
    ] = None,
    merge: Annotated[
        str | None,
        typer.Option(
            help="How the heads of a group become one: mean, first, random, medoid, norm-mean, "
            "procrustes, lowrank. Default: lowrank with --calibrate, mean without."
        ),
    ] = None,
    grouping: Annotated[
        cfg.Grouping,
        typer.Option(help="Which heads share: neighbours, or those that lose least by it."),
    ] = _CONVERT.grouping,
    calibrate: Annotated[
        str | None, typer.Option(help="Text that shows what the heads do; as --data elsewhere.")
    ] = None,
    calibration_tokens: CalibrationTokens = _CONVERT.calibration_tokens,
    seq_len: SeqLen = _CONVERT.seq_len,
    attention: AttentionKinds = None,
    shape: Annotated[
        cfg.ShapeOption,
        typer.Option(help="native: refuse what a plain config of the family cannot hold."),
    ] = cfg.ShapeOption.AUTO,
    heal_steps: Annotated[
        int | None,
        typer.Option("--heal", help="Then train the result to match the original, so many steps."),
    ] = None,
    train: Annotated[cfg.HealTrain, typer.Option(help="With --heal: what is trained.")] = (
        _HEAL.train
    ),
    learning_rate: Annotated[float, typer.Option(help="With --heal: highest learning rate.")] = (
        _HEAL.learning_rate
    ),
    bf16: Annotated[bool, typer.Option("--bf16", help="With --heal: compute in bfloat16.")] = False,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    dtype: DtypeOption = cfg.Dtype.AUTO,
    out_dtype: OutDtype = cfg.Dtype.AUTO,
    split: Split = "train",
    text_column: TextColumn = None,
    json_: Json = False,
    trust_remote_code: Trust = False,
    assume_supported: Assume = False,
    drop_unexpected: Drop = False,
) -> None:
    """Share KV heads among more queries (GQA, MQA), prove the result, and write it."""
    config = cfg.build(
        cfg.ConvertConfig,
        {
            "kv_heads": kv_head_counts(kv_heads),
            "kv_budget": kv_budget,
            "merge": merge,
            "grouping": grouping,
            "attention": attention or (),
            "calibration_tokens": calibration_tokens,
            "seq_len": seq_len,
            "dtype": dtype,
            "out_dtype": out_dtype,
            "seed": seed,
        },
    )
    if heal_steps is not None:
        if calibrate is None:
            raise HeadpruneError("--heal trains on the text of --calibrate: give --calibrate DATA.")
        healing = {"steps": heal_steps, "train": train, "learning_rate": learning_rate}
        cfg.build(cfg.HealConfig, healing)
    source = None if calibrate is None else data_config(calibrate, split, text_column, None)
    terminal.quiet_libraries()
    from headprune.checkpoint.outputs import claimed
    from headprune.cli import render
    from headprune.pipelines.convert_gqa import convert_gqa as pipeline
    from headprune.writing import beside

    converted_to = output if heal_steps is None else beside(output, "{}-unhealed")
    with claimed(output, overwrite, (model, calibrate)):
        with terminal.bar() as bar:
            result = pipeline(
                model,
                converted_to,
                config,
                calibrate=source,
                shape=shape,
                overwrite=overwrite,
                trust_remote_code=trust_remote_code,
                assume_supported=assume_supported,
                drop_unexpected=drop_unexpected,
                on_stage=bar.stage,
                on_module=bar.step,
            )
        terminal.warn(result.pruned.warnings)
        if not json_:
            render.converted(terminal.out, result)
        elif heal_steps is None:
            terminal.show_json(json.dumps(result.as_json(), indent=2))
        if heal_steps is None or calibrate is None:
            return
        heal(
            str(converted_to),
            teacher=model,
            data=calibrate,
            output=output,
            steps=heal_steps,
            seq_len=min(seq_len, _HEAL.seq_len),
            train=train,
            learning_rate=learning_rate,
            bf16=bf16,
            seed=seed,
            overwrite=overwrite,
            split=split,
            text_column=text_column,
            json_=json_,
            trust_remote_code=trust_remote_code,
            assume_supported=assume_supported,
            drop_unexpected=drop_unexpected,
            out_dtype=out_dtype,
        )
        shutil.rmtree(converted_to, ignore_errors=True)
