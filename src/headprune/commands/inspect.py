"""headprune inspect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

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


_NEEDS = {"data": "latent", "latent": "data", "device": "latent"}


@command(Panel.CHOOSE, _show, config=False, needs=_NEEDS)
def inspect(
    model: o.Model,
    *,
    latent: Annotated[bool, o.option("Also the price of latent attention (MLA), by size.")] = False,
    data: o.Data | None = None,
    device: o.Device = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    context: Context = Context(),
) -> Inspection:
    """Show a model's attention: heads, head_dim, parameters, KV cache, and savings of a cut."""
    from headprune.model.inspection import inspect

    inspected = inspect(model, context.allowed)
    if not latent or data is None:
        return inspected
    from headprune.config import data_config
    from headprune.formats.mla import priced

    return priced(inspected, model, data_config(data, None, None), context)
