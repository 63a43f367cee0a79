"""headprune verify."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headprune.commands.shared import Placed, Trust
from headprune.config import Place
from headprune.context import Context
from headprune.declaration import Chapter, Command, Panel, declare, option

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.proof.verify import Verification


class VerifyOptions(Trust, Placed):
    """Verify a result again: hashes, load routes, and outputs against the stored outputs."""

    folder: Path = option(
        "A folder that headprune wrote.", panel=Panel.INPUT, positional=True, metavar="FOLDER"
    )
    against: Place | None = option(
        "The model it was made from: compare with its gated form in full.", None, Panel.MAIN
    )


def run(options: VerifyOptions, context: Context) -> Verification:
    """Proves it."""
    from headprune.proof.verify import verify

    return verify(options.folder, options.against, options.trust_remote_code, context.stage)


def show(result: Verification, options: VerifyOptions, console: Console) -> None:
    """Prints check by check."""
    from headprune.render.results import verification

    verification(console, result)


declare(
    Command(
        "verify",
        Chapter.JUDGE,
        VerifyOptions,
        run,
        show,
        exit_code=lambda result: 0 if result.passed else 1,
    ),
)
