"""headprune inspect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headprune.commands import options as o
from headprune.commands.command import command
from headprune.commands.listing import Panel
from headprune.context import Context

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.model.inspection import Inspection


def _show(console: Console, result: Inspection, values: Mapping[str, Any]) -> None:
    from headprune.render.models import inspection

    inspection(console, result)


@command(Panel.CHOOSE, _show, config=False)
def inspect(
    model: o.Model,
    *,
    trust_remote_code: o.TrustRemoteCode = False,
    context: Context = Context(),
) -> Inspection:
    """Show a model's attention: heads, head_dim, parameters, KV cache, and savings of a cut."""
    from headprune.model.inspection import inspect

    return inspect(model, context.allowed)
