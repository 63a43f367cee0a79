"""Scores and plans at a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from headprune.render import records
from headprune.render.blocks import Block, Code, Paragraph, Table, percent
from headprune.render.results import roles_lost
from headprune.render.terminal import show

if TYPE_CHECKING:
    from headprune.planning.plan import Planned
    from headprune.schemas.scores import Scores

SHADES = "·░▒▓█"  # from the heads that would go first to those that would go last


def scores_json(scores: Scores) -> str:
    """Return metadata and scores for ``--json``."""
    content = scores.metadata.model_dump(mode="json")
    content["scores"] = {name: values.tolist() for name, values in scores.scores.items()}
    return json.dumps(content, indent=2)


def scores(console: Console, scores: Scores, output: Path, next_command: str) -> None:
    """Print scores and the next command."""
    heat_maps(console, scores)
    about = scores.metadata
    words = (
        f"{sum(about.units)} units ({about.unit.value}) of {len(about.modules)} attention modules, "
        f"{about.tokens:,} tokens. Written to {output}."
    )
    show(console, [Paragraph(words), Code(next_command, title="Next")])


def heat_maps(console: Console, scores: Scores) -> None:
    """Print a line per module and a sign per unit, by rank."""
    page: list[Block] = []
    for name, values in scores.scores.items():
        rows = []
        for module, ranks in _by_module(scores, values):
            shades = (SHADES[min(int(rank * len(SHADES)), len(SHADES) - 1)] for rank in ranks)
            rows.append((module, "".join(shades)))
        title = f"{name}  {scores.metadata.criteria[name]}"
        columns = ("attention module", scores.metadata.unit.value)
        page.append(Table(columns, rows, title, names=2, modules=True))
    show(console, [*page, Paragraph(f"{SHADES[0]} would go first, {SHADES[-1]} last")])


def planned(console: Console, result: Planned, output: Path | None, next_command: str) -> None:
    """Print a plan, its use of budgets and the next command."""
    plan = result.plan
    kept, heads = plan.kept_heads, plan.query_heads
    words = f"{kept} of {heads} query heads stay ({percent(kept, heads)}), by {result.criterion}."
    page: list[Block] = [records.heads(plan), Paragraph(words)]
    if result.spent:
        rows = [
            (name, f"{most:,.6g}", f"{spent:,.6g}") for name, (most, spent) in result.spent.items()
        ]
        page.append(Table(("budget", "at most", "plan"), rows))
    if result.kept_of_free is not None:
        share = percent(result.kept_of_free)
        page.append(Paragraph(f"It keeps {share} of the evidence of a choice for no engine."))
    page += roles_lost(result.roles_lost)
    page += [Paragraph(note, "note") for note in result.notes]
    if output is not None:
        page += [Paragraph(f"Written to {output}."), Code(next_command, title="Next")]
    show(console, page)


def _by_module(scores: Scores, values: torch.Tensor) -> Sequence[tuple[str, list[float]]]:
    order = values.argsort(stable=True).argsort(stable=True)
    ranks = order.double() / max(len(values) - 1, 1)
    parts = ranks.split(list(scores.metadata.units))
    return [(m, part.tolist()) for m, part in zip(scores.metadata.modules, parts, strict=True)]
