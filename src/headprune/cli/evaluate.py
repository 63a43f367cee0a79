"""headprune evaluate."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from headprune import config as cfg
from headprune.cli import terminal
from headprune.cli.options import (
    Confidence,
    Data,
    Drop,
    EvaluateBatch,
    Json,
    LabelColumn,
    MaxWindows,
    MeasuredDtype,
    Model,
    Seed,
    SeqLen,
    Split,
    TextColumn,
    Trust,
    batch_sizes,
    data_config,
    memory_bytes,
)

_EVALUATE = cfg.EvaluateConfig()


def evaluate(
    model: Model,
    data: Data,
    against: Annotated[
        str | None, typer.Option(help="Base model: report paired differences to it.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the report as JSON, also over an earlier one.")
    ] = None,
    seq_len: SeqLen = _EVALUATE.seq_len,
    batch_size: EvaluateBatch = _EVALUATE.batch_size,
    max_windows: MaxWindows = None,
    confidence: Confidence = _EVALUATE.confidence,
    speed: Annotated[bool, typer.Option(help="Time prefill and decoding.")] = True,
    decode_batches: Annotated[
        str, typer.Option(help="Batch sizes at which decoding is timed, comma-separated.")
    ] = "1,8",
    memory: Annotated[
        str | None,
        typer.Option(help="Memory such as 24GiB: say how long a context fits beside the weights."),
    ] = None,
    dtype: MeasuredDtype = cfg.Dtype.AUTO,
    seed: Seed = 0,
    split: Split = "test",
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    json_: Json = False,
    trust_remote_code: Trust = False,
    drop_unexpected: Drop = False,
) -> None:
    """Measure quality, size and speed, also against another model."""
    config = cfg.build(
        cfg.EvaluateConfig,
        {
            "seq_len": seq_len,
            "batch_size": batch_size,
            "max_windows": max_windows,
            "confidence": confidence,
            "speed": speed,
            "decode_batches": batch_sizes(decode_batches),
            "memory": memory_bytes(memory),
            "dtype": dtype,
            "seed": seed,
        },
    )
    source = data_config(data, split, text_column, label_column)
    terminal.quiet_libraries()
    from headprune.checkpoint.outputs import claimed_file
    from headprune.checkpoint.ownership import EVALUATION
    from headprune.cli import render
    from headprune.pipelines.evaluate import evaluate as pipeline

    claim: AbstractContextManager[None] = nullcontext()
    if output is not None:
        claim = claimed_file(output, EVALUATION, overwrite=True, inputs=(model, data, against))
    with claim, terminal.counted("evaluating") as progress:
        report = pipeline(
            model,
            source,
            config,
            against=against,
            trust_remote_code=trust_remote_code,
            drop_unexpected=drop_unexpected,
            progress=progress,
        )
        if output is not None:
            report.write(output)
    if json_:
        terminal.show_json(report.model_dump_json(indent=2))
    else:
        render.evaluation(terminal.out, report)
