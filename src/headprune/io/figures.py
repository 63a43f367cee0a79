"""Figures as files: pure drawing, numbers in and a matplotlib figure out.

Colours are those of Okabe and Ito, which the colour-blind tell apart, and every series also has a
marker and a dash of its own. Nothing here touches pyplot, so nothing has a global state and no
display is needed. Text is drawn as it is: a ``$`` in a model's name is no formula.

    figure = heat_map(scores, ["0", "1"], "Scores")
    save(figure, Path("scores.svg"))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from headprune.errors import HeadpruneError
from headprune.io.markup import shortened, xml_safe
from headprune.io.writing import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

P = ParamSpec("P")

INK, MUTED, GRID, PAPER = "#1b1f24", "#57606b", "#d8dde3", "#ffffff"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#4b3c8f", "#e69f00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (1, 1)))
EVIDENCE = "Blues"  # one hue, ever darker: read by lightness alone
SUFFIXES = (".svg", ".png")
DPI, MOST_PIXELS = 160, 16_000  # of a side
MOST_LETTERS = 80  # of a name
MOST_DRAWN = 1e100  # beyond it the arithmetic of axes overflows

_STYLE: dict[str, Any] = {
    "text.parse_math": False,
    "svg.fonttype": "none",  # text stays text: searchable, and set in the reader's font
    "svg.hashsalt": "headprune",  # the same figure gives the same file
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
    "hatch.linewidth": 0.7,
}


@dataclass(frozen=True)
class Series:
    """Points that belong together.

    Attributes:
        label: What the legend calls them.
        x: Abscissas.
        y: Ordinates, as many.
        low: Lower ends of the intervals of ``y``, if it has some.
        high: Upper ends.
        reference: Whether it is what the others are compared with; then it is grey.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    reference: bool = False


@contextmanager
def style() -> Iterator[None]:
    """Draws and saves in the style of this module."""
    from matplotlib import rc_context

    settings: Any = _STYLE  # matplotlib types every name of a setting
    with rc_context(settings):
        yield


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with style():
            return draw(*args, **kwargs)

    return styled


def drawable(text: str) -> str:
    """A name as a drawing can hold it: without controls, and not longer than the drawing."""
    return shortened(xml_safe(" ".join(text.split())), MOST_LETTERS)


def _number(value: float | None) -> float:
    """A number that an axis can hold; NaN, which is not drawn, for others."""
    known = value is not None and abs(value) <= MOST_DRAWN
    return float(value) if value is not None and known else math.nan


def _numbers(values: Sequence[float]) -> list[float]:
    return [_number(value) for value in values]


def _axes(
    width: float, height: float, title: str, x_label: str, y_label: str
) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
    axes = figure.subplots()
    axes.set(
        title=drawable(title), xlabel=drawable(x_label), ylabel=drawable(y_label), facecolor="none"
    )
    return figure, axes


@styled
def heat_map(
    rows: Sequence[Sequence[float | None]],
    row_labels: Sequence[str],
    title: str,
    value_label: str = "evidence",
    column_label: str = "head",
) -> Figure:
    """Layer by head: darker means more.

    Args:
        rows: One row of values per layer, of whatever length; None or NaN where there is no value.
        row_labels: One label per row.
        title: Title.
        value_label: What the colours mean.
        column_label: What a column is.
    """
    from matplotlib.patches import Rectangle

    width = max((len(row) for row in rows), default=0)
    grid = [[*map(_number, row), *[math.nan] * (width - len(row))] for row in rows]
    row_labels = [drawable(label) for label in row_labels]
    labels = max((len(label) for label in row_labels), default=0)
    figure, axes = _axes(
        max(3.4, 0.24 * width + 1.4 + 0.07 * labels),
        max(1.8, 0.24 * len(rows) + 0.9),
        title,
        column_label,
        "",
    )
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    finite = [v for row in grid for v in row if math.isfinite(v)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    for y, row in enumerate(rows):  # heads without a value are there, only unmeasured
        for x in range(len(row)):
            cell = Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor="#eef1f4", edgecolor=GRID)
            cell.set_zorder(0)
            axes.add_patch(cell)
    if width and rows:
        # equal values are neither low nor high: they get the middle of the scale
        span = (low, high) if high > low else (low - 1.0, high + 1.0)
        image = axes.imshow(grid, cmap=EVIDENCE, vmin=span[0], vmax=span[1], zorder=1)
        if finite:
            bar = figure.colorbar(image, ax=axes, label=drawable(value_label), shrink=0.8, pad=0.02)
            bar.outline.set_visible(False)
    axes.set_yticks(range(len(rows)), row_labels)
    step = 1 if width <= 16 else 2 if width <= 32 else 4
    axes.set_xticks(range(0, width, step))
    axes.set(xlim=(-0.5, max(width, 1) - 0.5), ylim=(max(len(rows), 1) - 0.5, -0.5))
    axes.tick_params(length=0)
    return figure


@styled
def curve(
    series: Sequence[Series],
    title: str,
    x_label: str,
    y_label: str,
    baseline: float | None = None,
    baseline_label: str = "original",
    higher_is_better: bool | None = None,
) -> Figure:
    """Quality against size: one line per series, the baseline, and rings around the best.

    Args:
        series: What was measured; sizes as ``x``, quality as ``y``.
        title: Title.
        x_label: What the size is.
        y_label: What the quality is.
        baseline: Quality of the original, drawn as a line across.
        baseline_label: Its name.
        higher_is_better: Direction of the quality; where it is given, rings mark the points that
            no other beats on both axes (see ``pareto``).
    """
    figure, axes = _axes(4.4, 3.1, title, x_label, y_label)
    if baseline is not None:
        dashes, label = (0, (4, 3)), drawable(baseline_label)
        axes.axhline(_number(baseline), color=MUTED, linestyle=dashes, linewidth=1.2, label=label)
    for index, line in enumerate(sorted(series, key=lambda line: line.reference)):
        _line(axes, line, index, markers=True)
    if higher_is_better is not None:
        drawn = ((line, _numbers(line.x), _numbers(line.y)) for line in series)
        points = [point for _, x, y in drawn for point in zip(x, y, strict=True)]
        points = [point for point in points if not any(map(math.isnan, point))]
        best = [points[i] for i in pareto(points, higher_is_better)]
        if best:
            xs, ys = zip(*best, strict=True)
            rings = axes.plot(xs, ys, "o", markersize=13, label="not beaten (Pareto)")[0]
            rings.set(markerfacecolor="none", markeredgecolor=INK, markeredgewidth=1.2)
    _legend(axes)
    return figure


def pareto(points: Sequence[tuple[float, float]], higher_is_better: bool) -> list[int]:
    """Positions of the (size, quality) points that no other beats: none is as small and better.

    Of equal points all are on the front.
    """
    sign = 1 if higher_is_better else -1
    return [
        i
        for i, (x, y) in enumerate(points)
        if not any(
            (other_x <= x and sign * other_y >= sign * y) and (other_x, other_y) != (x, y)
            for other_x, other_y in points
        )
    ]


@styled
def trajectories(
    series: Sequence[Series],
    title: str,
    x_label: str = "step",
    y_label: str = "",
    phases: Sequence[tuple[float, str]] = (),
) -> Figure:
    """Numbers that move while something is trained.

    Args:
        series: One line each.
        title: Title.
        x_label: What moves on.
        y_label: What is drawn.
        phases: Where something begins, and what; drawn as upright lines.
    """
    from matplotlib.ticker import MaxNLocator

    figure, axes = _axes(4.4, 2.9, title, x_label, y_label)
    for at, name in phases:
        axes.axvline(_number(at), color=MUTED, linestyle=":", linewidth=1.0)
        axes.annotate(
            drawable(name),
            (at, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -2),
            textcoords="offset points",
            va="top",
            color=MUTED,
            fontsize=8,
        )
    for index, line in enumerate(series):
        _line(axes, line, index, markers=len(line.x) == 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes)
    return figure


@styled
def bars(
    groups: Sequence[str],
    values: Mapping[str, Sequence[float]],
    title: str,
    y_label: str,
    reference: str | None = None,
    baseline: float | None = None,
) -> Figure:
    """Bars side by side, one group per name, one bar in it per series.

    Args:
        groups: What stands under the axis.
        values: Series name to one value per group.
        title: Title.
        y_label: What the values are.
        reference: The series that the others are compared with; it is grey.
        baseline: Where the original would stand, drawn as a line across.
    """
    figure, axes = _axes(4.4, 2.9, title, "", y_label)
    axes.grid(visible=False, axis="x")
    width = 0.8 / max(1, len(values))
    for index, (name, heights) in enumerate(values.items()):
        places = [g + (index - (len(values) - 1) / 2) * width for g in range(len(groups))]
        drawn = axes.bar(
            places,
            _numbers(heights),
            width * 0.92,
            label=drawable(name),
            color=MUTED if name == reference else SERIES[index % len(SERIES)],
            hatch="" if name == reference else ("", "//", "..", "xx")[index % 4],
            edgecolor=PAPER,
            linewidth=0,
        )
        numbers = [f"{h:,.0f}" if 1_000 <= abs(h) < 1e9 else f"{h:.3g}" for h in heights]
        axes.bar_label(drawn, numbers, fontsize=8, color=MUTED)
    if baseline is not None:
        axes.axhline(baseline, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.2, label="original")
    axes.set_xticks(range(len(groups)), [drawable(group) for group in groups])
    axes.margins(y=0.14)
    _legend(axes)
    return figure


def _line(axes: Axes, line: Series, index: int, markers: bool) -> None:
    colour = MUTED if line.reference else SERIES[index % len(SERIES)]
    style, sign = DASHES[index % len(DASHES)], MARKERS[index % len(MARKERS)]
    marker = ("*" if line.reference else sign) if markers else None
    xs, ys = _numbers(line.x), _numbers(line.y)
    axes.plot(xs, ys, color=colour, linestyle=style, marker=marker, label=drawable(line.label))
    if line.low is not None and line.high is not None:
        # an interval need not hold its estimate; a bar starts from there
        below = [max(0.0, y - low) for y, low in zip(ys, _numbers(line.low), strict=True)]
        above = [max(0.0, high - y) for y, high in zip(ys, _numbers(line.high), strict=True)]
        axes.errorbar(xs, ys, [below, above], fmt="none", ecolor=colour, elinewidth=1.2, capsize=3)


def _legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        # below the drawing, so that it never hides a point
        axes.figure.legend(handles, labels, loc="outside lower left", ncols=2)


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure as .svg or .png, by the suffix of ``path``.

    Raises:
        HeadpruneError: If the suffix is another one.
        CheckpointError: If the file cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise HeadpruneError(f"'{path}': figures are written as .svg or .png, not '{path.suffix}'.")
    buffer = BytesIO()
    # a date would make the same figure another file; by the other a later run knows its own
    metadata = {
        ".svg": {"Date": None, "Creator": "headprune"},
        ".png": {"Software": "headprune"},
    }
    with style():
        dpi = min(DPI, MOST_PIXELS / max(figure.get_size_inches()))
        figure.savefig(buffer, format=suffix[1:], dpi=dpi, metadata=metadata[suffix])
    write_whole(path, buffer.getvalue())
    return path
