"""headprune verify."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from headprune.commands import options as o
from headprune.commands.command import command
from headprune.commands.listing import Panel
from headprune.context import Context

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.result.verify import Verification


def _show(console: Console, result: Verification, values: Mapping[str, Any]) -> None:
    from headprune.render.results import verification

    verification(console, result)


@command(Panel.JUDGE, _show, config=False, exit_code=lambda result: 0 if result.passed else 1)
def verify(
    folder: Annotated[o.Model, o.argument("FOLDER", "A folder that headprune wrote.")],
    *,
    against: o.Against | None = None,
    device: str = "auto",
    placement: o.Placement = "auto",
    trust_remote_code: o.TrustRemoteCode = False,
    context: Context = Context(),
) -> Verification:
    """Verify a result again: hashes, load routes, and outputs against the stored outputs."""
    from headprune.result.verify import verify

    remote = context.allowed.trust_remote_code
    return verify(Path(folder), None if against is None else str(against), remote, context.stage)
