"""What was chosen among several ways to compress a model, and what the others would have cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from headprune.console import results
from headprune.console.tables import narrow, table

if TYPE_CHECKING:
    from headprune.compression.compress import Compressed, Outline
    from headprune.schemas.records import Contender, ModelChoice


def outline(console: Console, result: Outline) -> None:
    """What would be made and measured."""
    console.print(f"To be kept: {escape(result.goal)}.")
    console.print(f"Text, a part of each held out: {escape(', '.join(result.texts))}.")
    console.print("Made, measured on the held-out text, and the best of them taken:")
    for name in result.candidates:
        console.print(f"  {escape(name)}")
    if result.heal_steps is not None:
        console.print(f"Then healed for {result.heal_steps} steps, if that helps.")
    console.print("Nothing was written (--dry-run).")


def compressed(console: Console, result: Compressed) -> None:
    """The table of what was measured, the texts, and the proof."""
    choice = result.choice
    console.print(f"Kept: {escape(choice.goal)}; the best of {len(choice.contenders)} was taken.")
    contenders(console, choice)
    if choice.lead is not None:
        low, high = choice.lead
        told = "Better than the next by" if low > 0 else "Not told apart from the next:"
        console.print(f"{told} {low:.4f} to {high:.4f} (95 % of resamples).")
    by_text(console, choice)
    for name, reason in choice.failed.items():
        console.print(f"[yellow]note:[/] {escape(name)} was not possible: {escape(reason)}")
    results.proof(console, result.pruned.manifest)
    results.written(console, result.pruned)
    if result.unseen_beyond is not None:
        console.print(
            f"[yellow]note:[/] contexts of more than {result.unseen_beyond:,} tokens were not "
            "looked at, and what is found far back in them may be lost: evaluate it with --needle.",
            soft_wrap=True,
        )


def contenders(console: Console, choice: ModelChoice) -> None:
    """A row per model: how near it comes, and what it saves; KV bytes are of a token."""
    generates = choice.original.kv_cache_bytes_per_token > 0
    copies = choice.original.copying_nll is not None
    columns = ["", choice.measure]
    columns += ["copying NLL"] * copies + ["parameters"]
    columns += ["KV bytes"] * generates + ["query/KV heads"]
    grid = narrow(table(*columns))

    def add(one: Contender, mark: str) -> None:
        cells = [f"{mark}{escape(one.name)}", f"{one.held_out:.4f}"]
        cells += ["-" if one.copying_nll is None else f"{one.copying_nll:.3f}"] * copies
        cells.append(f"{one.parameters:,}")
        cells += [f"{one.kv_cache_bytes_per_token:,}"] * generates
        grid.add_row(*cells, f"{one.query_heads:,}/{one.kv_heads:,}")

    add(choice.original, "  ")
    for one in choice.contenders:
        add(one, "[green]>[/] " if one is choice.chosen else "  ")
    console.print(grid)


def by_text(console: Console, choice: ModelChoice) -> None:
    """The same of what was taken, text by text, where there are several."""
    if len(choice.chosen.by_text) < 2:
        return
    grid = table(f"{choice.measure}, taken", *choice.chosen.by_text)
    grid.add_row("", *(f"{value:.4f}" for value in choice.chosen.by_text.values()))
    console.print(grid)
