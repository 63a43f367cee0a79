"""headprune migrate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headprune.commands import options as o
from headprune.commands.command import command
from headprune.commands.listing import Panel
from headprune.config import Dtype, Writing, build
from headprune.context import Context

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.result.write import Pruned


def _show(console: Console, result: Pruned, values: Mapping[str, Any]) -> None:
    from headprune.render.results import pruned

    pruned(console, result)


@command(
    Panel.CUT,
    _show,
    config=False,
    warnings=lambda result: result.warnings,
)
def migrate(
    model: o.Model,
    output: o.Output,
    *,
    overwrite: o.Overwrite = False,
    dtype: o.Dtype = "auto",
    out_dtype: o.Dtype = "auto",
    device: str = "auto",
    placement: o.Placement = "auto",
    trust_remote_code: bool = False,
    context: Context = Context(),
) -> Pruned:
    """Rewrite a folder whose heads transformers 4 pruned, so that transformers 5 loads it."""
    from headprune.result.prune import migrate

    writing = build(Writing, locals())
    return migrate(model, Path(output), Dtype(dtype), writing, context)
