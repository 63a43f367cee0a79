"""headprune plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from headprune.commands.shared import Loading, OneModel, Placed, output
from headprune.config import PlanConfig, Replacing
from headprune.context import Allowed, Context
from headprune.declaration import Chapter, Command, Panel, declare, option

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.planning.plan import Planned


class PlanOptions(OneModel, PlanConfig, Replacing, Loading, Placed):
    """Choose what stays, from scores and budgets: heads, KV heads and whole layers' attention."""

    scores: Path = option("Folder from score.", panel=Panel.MAIN)
    output: Path | None = output("The plan file to write.", None)


def run(options: PlanOptions, context: Context) -> Planned:
    """Chooses, and writes the plan if that was asked for."""
    from headprune.planning.plan import plan

    return plan(
        options.model,
        options.scores,
        options.part(PlanConfig),
        options.output,
        options.overwrite,
        context,
    )


def show(result: Planned, options: PlanOptions, console: Console) -> None:
    """Prints the plan, and the command that cuts by it."""
    from headprune.render import next_commands, scores

    following = ""
    if options.output is not None:
        allowed = Allowed.by(options)
        following = next_commands.after_plan(result, options.output, options.model, allowed)
    scores.planned(console, result, options.output, following)


def _as_json(result: Planned) -> str:
    content = {
        "criterion": result.criterion,
        "notes": list(result.notes),
        "kept_of_free": result.kept_of_free,
        "roles_lost": result.roles_lost,
        "spent": {said: list(pair) for said, pair in result.spent.items()},
        "plan": result.plan.model_dump(mode="json"),
    }
    return json.dumps(content, indent=2)


declare(
    Command(
        "plan",
        Chapter.CHOOSE,
        PlanOptions,
        run,
        show,
        as_json=_as_json,
        needs={
            "per_layer": "keep",
            "keep_roles": "roles",
            "overwrite": "output",
            **dict.fromkeys(("device", "placement"), "min_speedup"),
        },
    ),
)
