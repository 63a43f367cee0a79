"""headprune score."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headprune import config as cfg
from headprune.cli import terminal
from headprune.cli.options import (
    Assume,
    AttentionKinds,
    CalibrationTokens,
    Drop,
    DtypeOption,
    Json,
    LabelColumn,
    Overwrite,
    ScoreBatch,
    Seed,
    SeqLen,
    Split,
    TextColumn,
    Trust,
    data_config,
)
from headprune.errors import HeadpruneError
from headprune.tensors.units import Unit

_CALIBRATION = cfg.CalibrationConfig()


def score(
    model: Annotated[
        str | None, typer.Argument(help="A model folder or a hub id.", metavar="[MODEL]")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Text (or labelled examples) that shows what the heads do."),
    ] = None,
    criterion: Annotated[
        list[str] | None,
        typer.Option(
            help="compensated (the default), gradient, fisher, fluctuation, wanda, reconstruction, "
            "leave-one-out, confidence, magnitude, random or gates (repeatable: what needs the "
            "same pass shares it)."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the scores.")] = None,
    show: Annotated[
        Path | None, typer.Option(help="Draw the scores of this folder instead.")
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(help="With --show: also as .svg or .png, a file per criterion."),
    ] = None,
    gates: Annotated[
        Path | None, typer.Option(help="With --criterion gates: folder from train-gates.")
    ] = None,
    unit: Annotated[
        Unit | None,
        typer.Option(help="What one score stands for. Default: head for MHA, kv-group for GQA."),
    ] = None,
    attention: AttentionKinds = None,
    calibration_tokens: CalibrationTokens = _CALIBRATION.tokens,
    seq_len: SeqLen = _CALIBRATION.seq_len,
    batch_size: ScoreBatch = _CALIBRATION.batch_size,
    dtype: DtypeOption = _CALIBRATION.dtype,
    seed: Seed = _CALIBRATION.seed,
    overwrite: Overwrite = False,
    split: Split = "train",
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    json_: Json = False,
    trust_remote_code: Trust = False,
    assume_supported: Assume = False,
    drop_unexpected: Drop = False,
) -> None:
    """Score every head by one or more criteria, without training."""
    if show is not None:
        if model is not None or output is not None:
            raise HeadpruneError("--show draws a scores folder: leave out MODEL and --output.")
        _show(show, figure, overwrite, json_)
        return
    if model is None or output is None:
        raise HeadpruneError("score needs a MODEL and --output, the folder for the scores.")
    if figure is not None:
        raise HeadpruneError("--figure goes with --show DIR, which draws scores.")
    config = cfg.build(
        cfg.CalibrationConfig,
        {
            "tokens": calibration_tokens,
            "seq_len": seq_len,
            "batch_size": batch_size,
            "dtype": dtype,
            "seed": seed,
        },
    )
    source = None if data is None else data_config(data, split, text_column, label_column)
    terminal.quiet_libraries()
    from headprune.cli import next_commands
    from headprune.cli import render_scores as render
    from headprune.pipelines.score import score as pipeline

    with terminal.watched() as watch:
        result = pipeline(
            model,
            output,
            criterion or ["compensated"],
            source,
            config,
            unit=unit,
            attention=attention or (),
            gates=gates,
            overwrite=overwrite,
            trust_remote_code=trust_remote_code,
            assume_supported=assume_supported,
            drop_unexpected=drop_unexpected,
            watch=watch,
        )
    if json_:
        terminal.show_json(render.scores_json(result))
    else:
        following = next_commands.after_scores(
            result,
            output,
            model,
            trust_remote_code=trust_remote_code,
            assume_supported=assume_supported,
            drop_unexpected=drop_unexpected,
        )
        render.scores(terminal.out, result, output, following)


def _show(folder: Path, figure: Path | None, overwrite: bool, json_: bool) -> None:
    terminal.quiet_libraries()
    from headprune.checkpoint.scores import read_scores
    from headprune.cli import render_scores as render

    found = read_scores(folder)
    if json_:
        terminal.show_json(render.scores_json(found))
    else:
        render.heat_maps(terminal.out, found)
    for path in render.figures(found, figure, overwrite) if figure is not None else ():
        terminal.err.print(f"Drawn to {path}.", markup=False)
