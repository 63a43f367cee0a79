"""headprune inspect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headprune.commands.shared import Loading, OneModel, Placed
from headprune.context import Context
from headprune.declaration import Chapter, Command, declare

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.model.inspection import Inspection


class InspectOptions(OneModel, Loading, Placed):
    """Show a model's attention: heads, head_dim, parameters, KV cache, and what a cut saves."""


def run(options: InspectOptions, context: Context) -> Inspection:
    """Measures it."""
    from headprune.model.inspection import inspect

    return inspect(options.model, context.allowed)


def show(result: Inspection, options: InspectOptions, console: Console) -> None:
    """Prints a table."""
    from headprune.render.models import inspection

    inspection(console, result)


declare(Command("inspect", Chapter.CHOOSE, InspectOptions, run, show))
