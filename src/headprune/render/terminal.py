"""Blocks at a terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid
from rich.text import Text as Styled

from headprune.render.blocks import KEPT, MERGED, WINDOW, Code, Page, Paragraph, Signs, Table

_NAME = 16  # columns that a name keeps in a narrow terminal
_NUMBER = 24  # columns of a number, at most
_TONES = {"verified": "bold green", "note": "yellow", "warning": "yellow"}
_WORDS = {"passed": "green", "broken": "bold red", "FAILED": "bold red", "cannot decide": "yellow"}


def show(console: Console, page: Page) -> None:
    """Print a page."""
    for block in page:
        if isinstance(block, Table):
            _table(console, block)
        elif isinstance(block, Paragraph):
            words = escape(block.words)
            if block.tone == "strong":
                words = f"[bold]{words}[/]"
            elif block.tone:
                words = f"[{_TONES[block.tone]}]{block.tone}:[/] {words}"
            console.print(words)
        elif isinstance(block, Code):
            # on one line, as it is pasted
            lines = f"\n{block.title}:\n  {block.text}"
            console.print(lines, soft_wrap=True, markup=False, emoji=False)


def _table(console: Console, table: Table) -> None:
    """Print a table; in a narrow terminal break headers and shorten module paths."""
    if table.title:
        console.print(f"[bold]{escape(table.title)}[/]")
    grid = _grid(table)
    wide = grid.__rich_measure__(console, console.options.update(width=10_000)).maximum
    pattern = ""
    if wide > console.width:
        if table.modules:
            short, pattern = shortened([row[0] for row in table.rows])
            rows = [(name, *row[1:]) for name, row in zip(short, table.rows, strict=True)]
            table = replace(table, columns=("module", *table.columns[1:]), rows=rows)
        columns = [
            c if n < table.names else c.replace(" ", "\n") for n, c in enumerate(table.columns)
        ]
        grid = _grid(replace(table, columns=columns))
        for position, column in enumerate(grid.columns):
            head = max(map(len, columns[position].split("\n")))
            longest = max((len(row[position]) for row in table.rows), default=0)
            if position < table.names:
                column.min_width = min(longest, _NAME)
            else:  # a sentence breaks, a number does not
                column.no_wrap = max(head, longest) <= _NUMBER
    console.print(grid)
    if pattern:
        console.print(f"[bright_black]attention modules: {escape(pattern)}[/]", soft_wrap=True)


def _grid(table: Table) -> Grid:
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    for position, column in enumerate(table.columns):
        grid.add_column(
            escape(column), justify="left" if position < table.names else "right", overflow="fold"
        )
    for row in table.rows:
        grid.add_row(*map(_cell, row))
    return grid


def _cell(text: str) -> Styled:
    if not isinstance(text, Signs):
        return Styled(text, _WORDS.get(text, ""))
    styled = Styled()
    for sign in text:
        stays = sign in (KEPT, WINDOW, MERGED, "=") or sign.isupper()
        styled.append(sign, "green" if stays else "bright_black")
    return styled


def _alike(lists: Sequence[Sequence[str]]) -> int:
    columns = zip(*lists, strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def shortened(paths: Sequence[str]) -> tuple[list[str], str]:
    """Return paths without their common start and end, and the pattern with it.

    ``["model.layers.0.attn", "model.layers.1.attn"]`` gives ``["0", "1"]`` and
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


def folded(rows: Mapping[str, Sequence[str]]) -> list[tuple[str, ...]]:
    """Return rows with equal neighbouring layers as one: ``layers.0-29.self_attn``."""
    runs: list[tuple[str, str, tuple[str, ...], int, int]] = []  # with first, last layer
    for path, cells in rows.items():
        layer = re.search(r"(?<=\.)\d+(?=\.)", path)
        if layer is None:
            runs.append((path, "", tuple(cells), -1, -1))
            continue
        number = int(layer[0])
        equal = (path[: layer.start()], path[layer.end() :], tuple(cells))
        for place, run in enumerate(runs):
            if run[:3] == equal and run[4] == number - 1:
                runs[place] = (*equal, run[3], number)
                break
        else:
            runs.append((*equal, number, number))
    return [
        (f"{start}{'' if first < 0 else first}{f'-{last}' if last > first else ''}{end}", *cells)
        for start, end, cells, first, last in runs
    ]
