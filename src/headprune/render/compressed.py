"""The choice among several ways to compress a model, at a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from headprune.render import records
from headprune.render.blocks import Block, Paragraph, Table
from headprune.render.results import written
from headprune.render.terminal import show

if TYPE_CHECKING:
    from headprune.compression.compress import Compressed, Outline


def outline(console: Console, result: Outline) -> None:
    """Print the candidates of a dry run."""
    page = [
        f"To be kept: {result.goal}.",
        f"Text, a part of each held out: {', '.join(result.texts)}.",
        "Candidates, measured on the held-out text; the best is taken:",
        *(f"  {name}" for name in result.candidates),
    ]
    if result.heal_steps is not None:
        page.append(f"Then healed for {result.heal_steps} steps, if that helps.")
    show(console, [*map(Paragraph, page), Paragraph("Nothing was written (--dry-run).")])


def compressed(console: Console, result: Compressed) -> None:
    """Print all candidates, the choice and the proof."""
    choice = result.choice
    page: list[Block] = records.chosen(choice)
    if choice.lead is not None:
        low, high = choice.lead
        words = "Better than the next by" if low > 0 else "Not told apart from the next:"
        page.append(Paragraph(f"{words} {low:.4f} to {high:.4f} (95 % of resamples)."))
    texts = choice.chosen.by_text
    if len(texts) > 1:
        cells = [("", *(f"{value:.4f}" for value in texts.values()))]
        page.append(Table((f"{choice.measure}, taken", *texts), cells))
    for name, reason in choice.failed.items():
        page.append(Paragraph(f"{name} was not possible: {reason}", "note"))
    page += written(result.pruned)
    if result.unseen_beyond is not None:
        words = (
            f"contexts of more than {result.unseen_beyond:,} tokens were not measured: "
            "evaluate it with --needle."
        )
        page.append(Paragraph(words, "note"))
    show(console, page)
