"""Tables and pictures that several results share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from headprune.schemas.plan import AttentionPlan, Plan


def table(*columns: str, numbers_from: int = 1) -> Table:
    """A plain table: the first columns hold names, the others numbers."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for position, column in enumerate(columns):
        side: Literal["left", "right"] = "right" if position >= numbers_from else "left"
        # nothing is cut off
        grid.add_column(column, justify=side, overflow="fold")
    return grid


def narrow(grid: Table) -> Table:
    """The same with the words of headers below each other; in a narrow terminal names give way."""
    for column in grid.columns:
        if column.justify == "right":
            column.header, column.no_wrap = str(column.header).replace(" ", "\n"), True
    return grid


def module_table(
    console: Console,
    columns: Sequence[str],
    rows: Mapping[str, Sequence[str | Text]],
    numbers_from: int = 1,
) -> None:
    """A table with a row per attention module, whose names are shortened where lines would break.

    Args:
        console: Where it is printed.
        columns: The columns behind that of the modules.
        rows: Their cells, by path.
        numbers_from: The first column of numbers.
    """

    def filled(first: str, names: Sequence[str]) -> Table:
        grid = table(first, *columns, numbers_from=numbers_from)
        for name, cells in zip(names, rows.values(), strict=True):
            grid.add_row(escape(name), *cells)
        return grid

    grid = filled("attention module", list(rows))
    wide = grid.__rich_measure__(console, console.options.update(width=10_000)).maximum
    if wide <= console.width:
        console.print(grid)
        return
    names, pattern = shortened(list(rows))
    console.print(narrow(filled("module", names)))
    if pattern:
        console.print(f"[bright_black]attention modules: {escape(pattern)}[/]", soft_wrap=True)


def _alike(lists: Sequence[Sequence[str]]) -> int:
    """With how many equal items all of them begin."""
    columns = zip(*lists, strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def shortened(paths: Sequence[str]) -> tuple[list[str], str]:
    """Paths without what they all begin and end with, and the pattern that has it.

    ``["model.layers.0.attn", "model.layers.1.attn"]`` becomes ``["0", "1"]`` and
    ``"model.layers.*.attn"``; no path becomes empty.
    """
    parts = [path.split(".") for path in paths]
    most = min(map(len, parts), default=1) - 1
    before = _alike([part[:most] for part in parts])
    after = _alike([part[before + 1 :][::-1] for part in parts])
    if not before + after:
        return list(paths), ""
    names = [".".join(part[before : len(part) - after]) for part in parts]
    ends = parts[0][:before], parts[0][len(parts[0]) - after :]
    return names, ".".join([*ends[0], "*", *ends[1]])


def folded(rows: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """Neighbouring layers with the same cells as one: ``layers.0-29.self_attn`` for thirty."""
    runs: list[tuple[re.Match[str] | None, str, int, Sequence[str]]] = []
    latest: dict[str, int] = {}  # where the last run of a kind of module stands
    for path, cells in rows.items():
        layer = re.search(r"(?<=\.)\d+(?=\.)", path)
        kind = path if layer is None else f"{path[: layer.start()]}*{path[layer.end() :]}"
        place = latest.get(kind)
        if layer is not None and place is not None:
            first, start, last, before = runs[place]
            if tuple(before) == tuple(cells) and int(layer[0]) == last + 1:
                runs[place] = first, start, last + 1, before
                continue
        latest[kind] = len(runs)
        runs.append((layer, path, int(layer[0]) if layer else 0, cells))
    names = {}
    for layer, path, last, cells in runs:
        if layer is not None and int(layer[0]) != last:
            path = f"{path[: layer.end()]}-{last}{path[layer.end() :]}"
        names[path] = cells
    return names


def head_picture(part: AttentionPlan) -> Text:
    """One layer's heads by id, kept and gone, with a gap between KV groups: ``■■■ ··· ■■■``."""
    from headprune.exporting.card import KEPT, heads_line  # with torch: not for every table

    picture = Text()
    for sign in heads_line(part):
        picture.append(sign, "green" if sign == KEPT else "bright_black")
    return picture


def plan_picture(console: Console, plan: Plan) -> None:
    """All layers of a plan, one line each."""
    rows = {
        name: (head_picture(part), f"{len(part.keep)}/{part.query_heads}")
        for name, part in plan.attentions.items()
    }
    module_table(console, ("heads", "kept"), rows, numbers_from=2)


def before_after(rows: list[tuple[str, int, int]]) -> Table:
    """A table of counts before and after, with the share that is left."""
    grid = table("", "before", "after", "left")
    for name, before, after in rows:
        left = f"{after / before:.1%}" if before else "-"
        grid.add_row(name, f"{before:,}", f"{after:,}", left)
    return grid


def next_line(console: Console, command: str) -> None:
    """The command that comes next, on one line, as it is pasted."""
    console.print("Next:\n")
    console.print(f"  {command}", soft_wrap=True, markup=False, emoji=False)
