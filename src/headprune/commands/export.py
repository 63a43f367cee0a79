"""headprune export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from headprune.commands import options as o
from headprune.commands.command import command
from headprune.commands.listing import Panel
from headprune.config import ExportConfig, build
from headprune.context import Context
from headprune.errors import HeadpruneError

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.formats.export import Exported


def show(console: Console, result: Exported, values: Mapping[str, Any]) -> None:
    from headprune.render.results import exported

    exported(console, result)


@command(Panel.SERVE, show)
def export(
    model: Annotated[o.Model, o.argument("FOLDER", "A model folder.")],
    output: o.Output,
    *,
    to: Annotated[str, o.option("gguf (llama.cpp), vllm, onnx or openvino.", metavar="FORMAT")],
    out_dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16", "q8_0"],
        o.option("Element type of the weights. auto: the checkpoint's."),
    ] = "auto",
    like: Annotated[o.File, o.option("GGUF file of the original, for its tokenizer.")]
    | None = None,
    prove: Literal["auto", "engine", "read-back"] = "auto",
    overwrite: o.Overwrite = False,
    trust_remote_code: o.TrustRemoteCode = False,
    context: Context = Context(),
) -> Exported:
    """Write a model for an engine (llama.cpp, vLLM), proven there or by reading it back."""
    if like is not None and to != "gguf":
        raise HeadpruneError("--like has no effect without --to gguf: give that, or leave it out.")
    from headprune.formats.export import export

    config = build(ExportConfig, locals())
    return export(model, Path(output), config, overwrite, context)
