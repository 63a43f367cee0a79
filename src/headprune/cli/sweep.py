"""headprune sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headprune import config as cfg
from headprune.cli import terminal
from headprune.cli.options import (
    Assume,
    CalibrationTokens,
    Data,
    Drop,
    DtypeOption,
    Json,
    LabelColumn,
    MaxWindows,
    Model,
    Overwrite,
    ScoreBatch,
    Seed,
    SeqLen,
    Split,
    TextColumn,
    Trust,
    UnitOption,
    data_config,
)
from headprune.errors import HeadpruneError

_CALIBRATION = cfg.CalibrationConfig()
_EVALUATE = cfg.EvaluateConfig()


def sweep(
    model: Model,
    data: Data,
    output: Annotated[Path, typer.Option(help="Folder for table, JSON and plot.")],
    keep: Annotated[
        str, typer.Option(help="Shares of heads to keep, comma-separated.")
    ] = "0.9,0.75,0.5",
    criterion: Annotated[
        list[str] | None,
        typer.Option(help="What chooses the heads (repeatable). Default: compensated."),
    ] = None,
    test: Annotated[
        str | None,
        typer.Option(help="Data to measure on. Default: that of --data, which flatters a refit."),
    ] = None,
    refit: Annotated[
        bool, typer.Option(help="Whether W_O is refitted to make up for the heads that go.")
    ] = True,
    rounds: Annotated[int, typer.Option(min=1, help="How often heads are scored per cut.")] = 1,
    unit: UnitOption = None,
    calibration_tokens: CalibrationTokens = _CALIBRATION.tokens,
    seq_len: SeqLen = _CALIBRATION.seq_len,
    batch_size: ScoreBatch = _CALIBRATION.batch_size,
    max_windows: MaxWindows = None,
    dtype: DtypeOption = _CALIBRATION.dtype,
    seed: Seed = _CALIBRATION.seed,
    overwrite: Overwrite = False,
    split: Split = "train",
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    test_split: Annotated[str, typer.Option(help="Split of --test, from the hub.")] = "test",
    test_text_column: Annotated[
        str | None, typer.Option(help="Text column of --test; two, comma-separated, for pairs.")
    ] = None,
    test_label_column: Annotated[
        str | None, typer.Option(help="Label or score column of --test.")
    ] = None,
    json_: Json = False,
    trust_remote_code: Trust = False,
    assume_supported: Assume = False,
    drop_unexpected: Drop = False,
) -> None:
    """Cut a model to several sizes and measure each: the curve of quality against size."""
    calibration = cfg.build(
        cfg.CalibrationConfig,
        {
            "tokens": calibration_tokens,
            "seq_len": seq_len,
            "batch_size": batch_size,
            "dtype": dtype,
            "seed": seed,
        },
    )
    evaluation = cfg.build(
        cfg.EvaluateConfig,
        {
            "seq_len": seq_len,
            "batch_size": batch_size,
            "max_windows": max_windows,
            "speed": False,
            "dtype": dtype,
            "seed": seed,
        },
    )
    terminal.quiet_libraries()
    from headprune.cli import render_scores as render
    from headprune.pipelines.sweep import sweep as pipeline

    tests = (test_split, test_text_column or text_column, test_label_column or label_column)
    with terminal.watched() as watch:
        result = pipeline(
            model,
            data_config(data, split, text_column, label_column),
            output,
            _shares(keep),
            criterion or ["compensated"],
            test=None if test is None else data_config(test, *tests),
            refit=refit,
            rounds=rounds,
            unit=unit,
            config=calibration,
            evaluation=evaluation,
            overwrite=overwrite,
            trust_remote_code=trust_remote_code,
            assume_supported=assume_supported,
            drop_unexpected=drop_unexpected,
            watch=watch,
        )
    if json_:
        terminal.show_json(result.model_dump_json(indent=2))
    else:
        render.sweep(terminal.out, result, output)


def _shares(text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not shares or any(not 0 <= share <= 1 for share in shares):
        raise HeadpruneError(f"--keep {text}: give shares between 0 and 1, such as 0.9,0.75,0.5.")
    return shares
