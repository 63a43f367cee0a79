"""headprune families."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headprune.commands.command import command
from headprune.commands.listing import Panel
from headprune.context import Context

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.family.capabilities import Capability


def _show(console: Console, rows: list[Capability], values: Mapping[str, Any]) -> None:
    from headprune.render import models

    models.families(console, rows)


def _as_json(rows: list[Capability]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=2)


@command(Panel.CHOOSE, _show, as_json=_as_json, config=False)
def families(*, context: Context = Context()) -> list[Capability]:
    """List the supported model families, and what works for each."""
    from headprune.family.capabilities import capabilities

    return capabilities()
