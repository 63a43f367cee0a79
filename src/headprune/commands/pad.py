"""headprune pad."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from headprune.commands import options as o
from headprune.commands.command import command
from headprune.commands.export import show
from headprune.commands.listing import Panel
from headprune.config import ExportConfig, build
from headprune.context import Context

if TYPE_CHECKING:
    from headprune.formats.export import Exported


@command(Panel.SERVE, show)
def pad(
    model: Annotated[o.Model, o.argument("FOLDER", "A model folder.")],
    output: o.Output,
    *,
    multiple_of: Annotated[int, o.option("The number of GPUs that share the heads.")],
    overwrite: o.Overwrite = False,
    trust_remote_code: o.TrustRemoteCode = False,
    context: Context = Context(),
) -> Exported:
    """Add heads that compute nothing, so that all divide by a number of GPUs."""
    from headprune.formats.export import export

    config = build(ExportConfig, locals(), to="padded")
    return export(model, Path(output), config, overwrite, context)
