"""Scores and plans as tables and pictures for a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from headprune.console.tables import module_table, next_line, plan_picture, table

if TYPE_CHECKING:
    from headprune.planning.plan import Planned
    from headprune.schemas.scores import Scores

SHADES = "·░▒▓█"  # from the heads that would go first to those that would go last


def scores_json(scores: Scores) -> str:
    """Metadata and scores, for ``--json``."""
    content = scores.metadata.model_dump(mode="json")
    content["scores"] = {name: values.tolist() for name, values in scores.scores.items()}
    return json.dumps(content, indent=2)


def scores(console: Console, scores: Scores, output: Path, next_command: str) -> None:
    """What was scored, drawn, and the command that comes next."""
    heat_maps(console, scores)
    what = scores.metadata
    console.print(
        f"{sum(1 for _ in next(iter(scores.scores.values())))} units ({what.unit.value}) of "
        f"{len(what.modules)} attention modules, {what.tokens:,} tokens. Written to "
        f"{escape(str(output))}."
    )
    next_line(console, next_command)


def heat_maps(console: Console, scores: Scores) -> None:
    """Per criterion: one line per module, one character per unit, by rank among all units."""
    for name, values in scores.scores.items():
        console.print(
            f"[bold]{escape(name)}[/]  [bright_black]{escape(scores.metadata.criteria[name])}[/]"
        )
        rows = {}
        for module, ranks in _by_module(scores, _ranks(values)):
            shades = (SHADES[min(int(r * len(SHADES)), len(SHADES) - 1)] for r in ranks)
            rows[module] = [Text("".join(shades))]
        module_table(console, (scores.metadata.unit.value,), rows, numbers_from=2)
    console.print(f"[bright_black]{SHADES[0]} would go first, {SHADES[-1]} last[/]")


def planned(console: Console, result: Planned, output: Path | None, next_command: str) -> None:
    """The plan, drawn, what it spends of every budget, and the command that comes next."""
    plan_picture(console, result.plan)
    plan = result.plan
    share = plan.kept_heads / max(plan.query_heads, 1)
    console.print(
        f"{plan.kept_heads} of {plan.query_heads} query heads stay ({share:.1%}), by "
        f"{result.criterion}."
    )
    if result.spent:
        grid = table("budget", "at most", "plan")
        for said, (most, spent) in result.spent.items():
            grid.add_row(escape(said), f"{most:,.6g}", f"{spent:,.6g}")
        console.print(grid)
    if result.kept_of_free is not None:
        console.print(
            f"It keeps {result.kept_of_free:.1%} of the evidence of a choice for no engine and one "
            "device."
        )
    roles_lost(console, result.roles_lost)
    for note in result.notes:
        console.print(f"[yellow]note:[/] {escape(note)}")
    if output is not None:
        console.print(f"Written to {escape(str(output))}.")
        next_line(console, next_command)


def roles_lost(console: Console, lost: Sequence[str] | None) -> None:
    """The roles that a plan loses, where that is known."""
    if lost:
        console.print(f"[yellow]No head stays of these roles:[/] {', '.join(lost)}.")
    elif lost is not None:
        console.print("Every role that heads have keeps one.")


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """Rank among all units, between 0 and 1."""
    order = values.argsort(stable=True).argsort(stable=True)
    return order.double() / max(len(values) - 1, 1)


def _by_module(scores: Scores, values: torch.Tensor) -> list[tuple[str, list[float]]]:
    parts = values.split(list(scores.metadata.units))
    return [(m, part.tolist()) for m, part in zip(scores.metadata.modules, parts, strict=True)]
