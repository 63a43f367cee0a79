"""headprune prune."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headprune import config as cfg
from headprune.cli import terminal
from headprune.cli.options import (
    Assume,
    Drop,
    DtypeOption,
    Json,
    LabelColumn,
    Model,
    OutDtype,
    Overwrite,
    Split,
    TextColumn,
    Trust,
    WhichScores,
    data_config,
    share_or_count,
)
from headprune.errors import HeadpruneError

_CALIBRATION = cfg.CalibrationConfig()


def prune(
    model: Model,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the result; not needed with --dry-run.")
    ] = None,
    gates: Annotated[Path | None, typer.Option(help="Folder from train-gates.")] = None,
    scores: Annotated[Path | None, typer.Option(help="Folder from score; needs --keep.")] = None,
    criterion: WhichScores = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="plan.json, or a JSON map from module path to the heads to remove, as "
            r'{"model.layers.0.self_attn": \[0, 3]}.'
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Share (1.0 is all) or count (1 is one) of heads to keep: with --scores, or "
            "another than the gates were trained for."
        ),
    ] = None,
    refit: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="Refit W_O by least squares on this text, layer after layer, so that the heads "
            "that stay make up for those that go.",
        ),
    ] = None,
    calibration_tokens: Annotated[
        int, typer.Option(help="With --refit: how much of the text is used.")
    ] = _CALIBRATION.tokens,
    seq_len: Annotated[
        int,
        typer.Option(
            help="With --refit: tokens per sequence, about as many as the model will see."
        ),
    ] = _CALIBRATION.seq_len,
    shape: Annotated[
        cfg.ShapeOption,
        typer.Option(
            help="auto: other counts in every layer, equal groups within a layer. native: the same "
            "counts everywhere, so that a plain config holds the result. ragged: any head, also "
            "where that leaves KV heads with unequal numbers of queries."
        ),
    ] = cfg.ShapeOption.AUTO,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan, write nothing.")
    ] = False,
    overwrite: Overwrite = False,
    dtype: DtypeOption = cfg.Dtype.AUTO,
    out_dtype: OutDtype = cfg.Dtype.AUTO,
    split: Split = "train",
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    json_: Json = False,
    trust_remote_code: Trust = False,
    assume_supported: Assume = False,
    drop_unexpected: Drop = False,
) -> None:
    """Cut heads out for real, prove that the result is the gated model, and write it."""
    if output is None and not dry_run:
        raise HeadpruneError("prune needs --output, the folder to write (or --dry-run).")
    calibration = cfg.build(
        cfg.CalibrationConfig,
        {"tokens": calibration_tokens, "seq_len": seq_len, "dtype": dtype},
    )
    terminal.quiet_libraries()
    from headprune.cli import render
    from headprune.pipelines import prune as pipeline

    what: dict[str, Any] = {
        "gates": gates,
        "plan": plan,
        "scores": scores,
        "criterion": criterion,
        "keep": share_or_count(keep, "--keep"),
        "shape": shape,
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
        "assume_supported": assume_supported,
        "drop_unexpected": drop_unexpected,
    }
    if dry_run:
        preview = pipeline.preview(model, **what)
        if json_:
            terminal.show_json(json.dumps(preview.as_json(), indent=2))
        else:
            render.preview(terminal.out, preview)
        return
    assert output is not None
    with terminal.bar() as bar:
        pruned = pipeline.prune(
            model,
            output,
            refit=None if refit is None else data_config(refit, split, text_column, label_column),
            calibration=calibration,
            overwrite=overwrite,
            out_dtype=out_dtype,
            on_stage=bar.stage,
            on_module=bar.step,
            **what,
        )
    terminal.warn(pruned.warnings)
    if json_:
        terminal.show_json(json.dumps(pruned.as_json(), indent=2))
    else:
        render.pruned(terminal.out, pruned)
