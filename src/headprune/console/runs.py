"""A recipe's steps as tables for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from headprune.console.tables import table
from headprune.estimates import duration
from headprune.placements import Placement

if TYPE_CHECKING:
    from headprune.recipes.forecast import Forecast
    from headprune.recipes.needs import Needs
    from headprune.recipes.run import Run


def finished(console: Console, run: Run) -> None:
    """All steps with their results, and where they lie."""
    grid = table("step", "result", "output", "time", numbers_from=3)
    for name, step in run.record.steps.items():
        took = "done before" if name in run.cached else duration(step.seconds or 0)
        result = escape(step.summary) if step.passed else f"[bold red]{escape(step.summary)}[/]"
        grid.add_row(name, result, escape(str(run.output / name)), took)
    console.print(grid)
    console.print(
        f"{escape(str(run.output))}/recipe.yaml has all settings, requirements.lock the versions."
    )


def forecast(console: Console, outlook: Forecast) -> None:
    """What would run, and what it would take."""
    grid = table("step", "would run?", "where", "time", "memory", "disk", numbers_from=3)
    for step in outlook.steps:
        why = "no, done before" if step.cached else f"yes: {step.why}"
        need = step.estimate
        cells = ("-", "-", "-", "-")
        if not step.cached:
            took = "?" if need.seconds is None else duration(need.seconds)
            where, memory = _place(step.needs)
            cells = (where, took, memory, size(need.disk_bytes))
        grid.add_row(step.name, escape(why), *cells)
    console.print(grid)
    total = outlook.seconds
    console.print(
        f"In all about {'?' if total is None else duration(total)} and {size(outlook.disk_bytes)} "
        f"of disk ({size(outlook.free_bytes)} are free)."
    )
    console.print(f"[bright_black]{escape(outlook.rule)}[/]")
    console.print("Nothing was run (--dry-run).")


def _place(needs: Needs) -> tuple[str, str]:
    """Where a step runs, and its memory there."""
    layers = ", layers" if needs.placement is Placement.LAYERS else ""
    memory = size(needs.host_bytes)
    if needs.device_bytes is not None:
        memory = f"{size(needs.device_bytes)}, host {memory}"
    return f"{needs.device}{layers}", memory


def size(count: float | int) -> str:
    """An amount of memory to be read: ``1.3 GiB``."""
    for unit, digits in (("KiB", 0), ("MiB", 0), ("GiB", 1)):
        count /= 1024
        if count < 1000 or unit == "GiB":
            return f"{count:,.{digits}f} {unit}"
    raise AssertionError
