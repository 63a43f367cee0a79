"""Blocks of a page, for every medium, and formats of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headprune.render.head_map import HeadMap


KEPT, WINDOW, MERGED = "■", "◧", "▣"
ZERO, GONE = "□", "·"  # a zero head is in the weights and computes nothing


class Signs(str):
    """A cell with a sign per head."""


@dataclass(frozen=True)
class Table:
    """A table of plain text; renderers escape it."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    names: int = 1  # columns of names, from the left; the others hold numbers
    modules: bool = False  # the first column holds module paths, which a narrow terminal shortens
    facts: bool = False  # cells are long values that may break anywhere


@dataclass(frozen=True)
class Paragraph:
    """Plain text; a tone is printed in front of it."""

    words: str
    tone: Literal["", "verified", "note", "warning", "strong"] = ""


@dataclass(frozen=True)
class Code:
    """Lines to copy, or a drawing of characters."""

    text: str
    language: str = "bash"
    title: str = ""


@dataclass(frozen=True)
class Chart:
    """A drawing and its numbers."""

    title: str
    figure: Figure
    alt: str  # a sentence for screen readers
    table: Table
    note: str = ""
    wide: bool = False  # it needs the width of the page


@dataclass(frozen=True)
class Tile:
    """A headline number of the report page."""

    name: str
    value: str
    detail: str
    state: str = ""


@dataclass(frozen=True)
class Section:
    """Blocks under a title."""

    title: str
    blocks: Sequence[Block]


Block: TypeAlias = "Table | Paragraph | Code | Chart | Section | HeadMap"
Page: TypeAlias = Sequence[Block]


def percent(part: float, whole: float = 1.0) -> str:
    """Return ``50.0%``, or ``-`` for a whole of 0."""
    return f"{part / whole:.1%}" if whole else "-"


def byte_size(count: float) -> str:
    """Return bytes as MiB or GiB."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def at_context(tokens: int) -> str:
    """Return the context of a size of KV cache: "per token", or "at 8,192 tokens"."""
    return "per token" if tokens == 1 else f"at {tokens:,} tokens"


def short_count(count: int) -> str:
    """Return a count in a few characters: ``1.24 B``."""
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:,}"


def plural(count: int, noun: str) -> str:
    """Return ``1 limit``, ``2 limits``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def before_after(rows: Sequence[tuple[str, int, int]]) -> Table:
    """Return counts before and after, with the fraction left."""
    cells = [(name, f"{b:,}", f"{a:,}", percent(a, b)) for name, b, a in rows]
    return Table(("", "before", "after", "left"), cells)
