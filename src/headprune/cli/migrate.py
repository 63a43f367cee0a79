"""headprune migrate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headprune import config as cfg
from headprune.cli import terminal
from headprune.cli.options import (
    Assume,
    Drop,
    DtypeOption,
    Json,
    Model,
    OutDtype,
    Overwrite,
    Trust,
)


def migrate(
    model: Model,
    output: Annotated[Path, typer.Argument(help="Folder for the result.", metavar="OUT")],
    overwrite: Overwrite = False,
    dtype: DtypeOption = cfg.Dtype.AUTO,
    out_dtype: OutDtype = cfg.Dtype.AUTO,
    json_: Json = False,
    trust_remote_code: Trust = False,
    assume_supported: Assume = False,
    drop_unexpected: Drop = False,
) -> None:
    """Rewrite a folder whose heads transformers 4 pruned, so that transformers 5 loads it."""
    terminal.quiet_libraries()
    from headprune.cli import render
    from headprune.pipelines import prune as pipeline

    with terminal.stages() as on_stage:
        result = pipeline.migrate(
            model,
            output,
            overwrite=overwrite,
            dtype=dtype,
            out_dtype=out_dtype,
            trust_remote_code=trust_remote_code,
            assume_supported=assume_supported,
            drop_unexpected=drop_unexpected,
            on_stage=on_stage,
        )
    terminal.warn(result.warnings)
    if json_:
        terminal.show_json(result.manifest.model_dump_json(indent=2))
    else:
        render.pruned(terminal.out, result)
