"""Figures of heads, layer by head: marks of a few kinds, and scores on one scale."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headprune.io.figures import GRID, MARKERS, MUTED, PAPER, SERIES, drawable, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CELL = 0.26  # inches of a head with a mark
_SMALL, _LARGE = 10.0, 125.0  # area of a mark, in square points
_FRAME: dict[str, Any] = {"fill": False, "edgecolor": MUTED, "linewidth": 0.6}
_WIDE = 10.0  # inches that small multiples fill before a second row begins


@dataclass(frozen=True)
class Mark:
    """A head: a kind of the legend, or "", and a share of the largest area."""

    kind: str = ""
    size: float | None = None


@dataclass(frozen=True)
class MarkedHeads:
    """The heads of a model, by layer: marks by id, cut ids and groups of ids."""

    title: str
    rows: Sequence[Mapping[int, Mark]]
    gone: Sequence[Collection[int]]
    groups: Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class ScoredHeads:
    """A score of all heads, by layer: scores by id, outlined and cut ids."""

    title: str
    rows: Sequence[Mapping[int, float]]
    outlined: Sequence[Collection[int]]
    gone: Sequence[Collection[int]]


@styled
def marked_heads(
    panels: Sequence[MarkedHeads], labels: Sequence[str], kinds: Sequence[str], note: str
) -> Figure:
    """Draw heads by layer: colour and shape are a kind, area a size, cut heads hollow."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    columns = max(1, *(_columns([*panel.rows, *panel.gone]) for panel in panels))
    letters = max((len(label) for label in labels), default=0)
    width = len(panels) * (_CELL * columns + 0.45) + 0.08 * letters + 0.3
    across = max(1, min(len(kinds) + 1, int(max(width, 3.6) / 1.75)))
    legend = 0.2 * -(-(len(kinds) + 2) // across) + 0.35
    size = max(width, 3.6), _CELL * len(labels) + 0.75 + legend
    figure = Figure(figsize=size, layout="constrained", facecolor=PAPER)
    several = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(several, panels, strict=True):
        _cells(axes, columns, labels, drawable(panel.title))
        places = [(x, y) for y, row in enumerate(panel.rows) for x in row]
        _squares(axes, places, 0.44, facecolor=GRID, alpha=0.35, linewidth=0)
        cut = [(x, y) for y, row in enumerate(panel.gone) for x in row]
        _squares(axes, cut, 0.34, facecolor="none", edgecolor=MUTED, linestyle=(0, (2, 2)))
        for y, groups in enumerate(panel.groups):
            for group in groups:
                low, high = min(group), max(group)
                size = high - low + 0.94, 0.94
                axes.add_patch(Rectangle((low - 0.47, y - 0.47), *size, **_FRAME))
        for kind in dict.fromkeys(mark.kind for row in panel.rows for mark in row.values()):
            _marks(axes, panel, kind, kinds)
    handles = [_handle(kinds, kind) for kind in kinds]
    handles.append(_handle(kinds, "", label="no role, or another"))
    if any(cut for panel in panels for cut in panel.gone):
        handles.append(_handle(kinds, "", label="cut", marker="s", markerfacecolor="none"))
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=across,
        title=note,
        title_fontsize=9,
        alignment="left",
        handletextpad=0.2,
        columnspacing=1.2,
    )
    return figure


@styled
def scored_heads(panels: Sequence[ScoredHeads], labels: Sequence[str]) -> Figure:
    """Draw small maps of scores on one scale from 0 to 1."""
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    columns = max(1, *(_columns([*panel.rows, *panel.gone]) for panel in panels))
    cell = 0.13 if max(columns, len(labels)) > 12 else 0.2
    letters = max((len(label) for label in labels), default=0)
    width = max(cell * columns + 0.07 * letters + 0.2, 1.3)
    across = max(1, min(len(panels), int(_WIDE / width)))
    down = -(-len(panels) // across)
    # transparent where there is nothing, so that paper of any colour shows through
    scale = LinearSegmentedColormap.from_list("scores", [(SERIES[0], 0.0), (SERIES[0], 1.0)])
    figure = Figure(
        figsize=(max(across * width, 4.2), down * (cell * len(labels) + 0.75) + 0.6),
        layout="constrained",
        facecolor=PAPER,
    )
    several = figure.subplots(down, across, squeeze=False)
    for place, axes in enumerate(several.flat):
        if place >= len(panels):
            axes.set_visible(False)
            continue
        panel = panels[place]
        _cells(axes, columns, labels if place % across == 0 else [""] * len(labels), "")
        axes.set_title(panel.title, fontsize=8.5)
        axes.tick_params(labelsize=7)
        grid = np.full((len(labels), columns), np.nan)
        for y, row in enumerate(panel.rows):
            for x, score in row.items():
                grid[y, x] = score
        axes.imshow(grid, cmap=scale, vmin=0, vmax=1, aspect="equal")
        places = [(x, y) for y, row in enumerate(panel.rows) for x in row]
        _squares(axes, places, 0.5, facecolor="none", edgecolor=GRID, linewidth=0.4)
        strong = [(x, y) for y, row in enumerate(panel.outlined) for x in row]
        _squares(axes, strong, 0.5, facecolor="none", edgecolor=SERIES[1], linewidth=1.3)
        cut = [(x, y) for y, row in enumerate(panel.gone) for x in row]
        if cut:
            axes.plot(*zip(*cut, strict=True), "x", color=MUTED, markersize=3, markeredgewidth=0.7)
        axes.set(xlim=(-0.6, columns - 0.4), ylim=(len(labels) - 0.4, -0.6))
    shades = [
        Patch(facecolor=(SERIES[0], n / 4), edgecolor=GRID, label=f"{n / 4:g}") for n in range(5)
    ]
    told = [Patch(facecolor="none", edgecolor=SERIES[1], linewidth=1.3, label="over its line")]
    if any(row for panel in panels for row in panel.gone):
        told.append(_handle((), "cut", marker="x", markersize=4))
    figure.legend(
        handles=[*shades, *told],
        loc="outside lower left",
        ncols=7,
        handlelength=1,
        columnspacing=1.2,
    )
    return figure


def _columns(rows: Sequence[Collection[int]]) -> int:
    return max((max(row, default=-1) for row in rows), default=-1) + 1


def _cells(axes: Axes, columns: int, labels: Sequence[str], title: str) -> None:
    axes.set_title(title)
    axes.set_facecolor("none")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_aspect("equal")
    axes.tick_params(length=0)
    rows = len(labels)
    step = 1 if rows <= 40 else math.ceil(rows / 40)
    axes.set_yticks(range(0, rows, step), [drawable(label) for label in labels[::step]])
    axes.set_xticks(range(0, columns, 1 if columns <= 10 else 2 if columns <= 16 else 4))
    axes.set(xlim=(-0.6, columns - 0.4), ylim=(rows - 0.4, -0.6))


def _squares(axes: Axes, places: Sequence[tuple[int, int]], half: float, **look: Any) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    squares = [Rectangle((x - half, y - half), 2 * half, 2 * half) for x, y in places]
    axes.add_collection(PatchCollection(squares, **look))


def _marks(axes: Axes, panel: MarkedHeads, kind: str, kinds: Sequence[str]) -> None:
    """Draw the heads of a kind, in ten sizes: a file holds each shape once."""
    known = kinds.index(kind) if kind in kinds else None
    usual, least = (0.6, 0.2) if kind else (0.0, 0.0)
    by_size: dict[float, list[tuple[int, int]]] = {}
    for y, row in enumerate(panel.rows):
        for x, mark in row.items():
            if mark.kind == kind:
                share = usual if mark.size is None else min(max(mark.size, least), 1.0)
                by_size.setdefault(round(share, 1), []).append((x, y))
    for share, places in by_size.items():
        xs, ys = zip(*places, strict=True)
        axes.scatter(
            xs,
            ys,
            s=_SMALL + share * (_LARGE - _SMALL),
            marker="o" if known is None else MARKERS[known],
            color=MUTED if known is None else SERIES[known],
            alpha=0.55 if known is None else 1.0,
            linewidths=0,
            zorder=3,
        )


def _handle(kinds: Sequence[str], kind: str, **look: Any) -> Any:
    from matplotlib.lines import Line2D

    known = kinds.index(kind) if kind in kinds else None
    colour = MUTED if known is None else SERIES[known]
    usual = {
        "label": drawable(kind),
        "marker": "o" if known is None else MARKERS[known],
        "color": colour,
        "markersize": 6.5,
        "linestyle": "",
        "markeredgewidth": 1.0,
        "markeredgecolor": colour,
    }
    return Line2D([], [], **{**usual, **look})
