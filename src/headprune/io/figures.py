"""Figures as files, in the colours of Okabe and Ito, without pyplot."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headprune.io.markup import shortened, xml_safe
from headprune.io.writing import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID, PAPER = "#1b1f24", "#57606b", "#d8dde3", "#ffffff"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#4b3c8f", "#e69f00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (1, 1)))
SUFFIXES = (".svg", ".png")
DPI = 160
MOST_LETTERS = 80  # of a name
# names of these colours in a page, which a dark page redefines
_IN_PAGE = {
    **{INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)", PAPER: "var(--card)"},
    **{colour: f"var(--series-{i})" for i, colour in enumerate(SERIES)},
}

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
}


@dataclass(frozen=True)
class Series:
    """Points that belong together.

    Attributes:
        low: Lower ends of the intervals of ``y``.
        high: Upper ends.
        reference: The base of a comparison, drawn in grey.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    reference: bool = False


@contextmanager
def style(**changes: Any) -> Iterator[None]:
    """Draw and save in the style of this module."""
    from matplotlib import rc_context

    settings: Any = {**_STYLE, **changes}  # matplotlib types every name of a setting
    with rc_context(settings):
        yield


def drawable(text: str) -> str:
    """Return a name without controls, at most as long as a drawing."""
    return shortened(xml_safe(" ".join(text.split())), MOST_LETTERS)


@style()
def curve(  # a drawing has many labels
    series: Sequence[Series],
    title: str,
    x_label: str,
    y_label: str,
    baseline: float | None = None,
    baseline_label: str = "original",
    higher_is_better: bool | None = None,
) -> Figure:
    """Draw quality against size.

    Args:
        series: One line each; without markers where a line has many points.
        title: Title.
        x_label: Name of the sizes.
        y_label: Name of the quality.
        baseline: Quality of the original, drawn as a line across.
        baseline_label: Its name.
        higher_is_better: Direction of the quality; if given, rings mark the Pareto front.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4, 3.1), layout="constrained", facecolor=PAPER)
    axes = figure.subplots()
    axes.set(title=drawable(title), xlabel=drawable(x_label), ylabel=drawable(y_label))
    axes.set_facecolor("none")
    if baseline is not None:
        dashes, label = (0, (4, 3)), drawable(baseline_label)
        axes.axhline(baseline, color=MUTED, linestyle=dashes, linewidth=1.2, label=label)
    for index, line in enumerate(sorted(series, key=lambda line: line.reference)):
        _line(axes, line, index)
    if higher_is_better is not None:
        points = [point for line in series for point in zip(line.x, line.y, strict=True)]
        xs, ys = zip(*(points[i] for i in pareto(points, higher_is_better)), strict=True)
        rings = axes.plot(xs, ys, "o", markersize=13, label="not beaten (Pareto)")[0]
        rings.set(markerfacecolor="none", markeredgecolor=INK, markeredgewidth=1.2)
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        # below the drawing, so that it never hides a point
        figure.legend(handles, labels, loc="outside lower left", ncols=2)
    return figure


@style()
def courses(
    x: Sequence[float], lines: Mapping[str, Sequence[Sequence[float]]], x_label: str, y_label: str
) -> Figure:
    """Draw many thin lines in groups, each with a colour and a name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4, 3.1), layout="constrained", facecolor=PAPER)
    axes = figure.subplots()
    axes.set(xlabel=drawable(x_label), ylabel=drawable(y_label))
    axes.set_facecolor("none")
    for index, (name, group) in enumerate(lines.items()):
        for number, y in enumerate(group):
            label = None if number else drawable(name)
            axes.plot(
                x, y, color=SERIES[index % len(SERIES)], linewidth=0.8, alpha=0.6, label=label
            )
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=2)
    return figure


def _line(axes: Axes, line: Series, index: int) -> None:
    colour = MUTED if line.reference else SERIES[index % len(SERIES)]
    marker = "*" if line.reference else MARKERS[index % len(MARKERS)]
    axes.plot(
        line.x,
        line.y,
        color=colour,
        linestyle=DASHES[index % len(DASHES)],
        marker=marker if len(line.x) <= 30 else None,
        label=drawable(line.label),
    )
    if line.low is not None and line.high is not None:
        # an interval need not hold its estimate; a bar starts from there
        below = [max(0.0, y - low) for y, low in zip(line.y, line.low, strict=True)]
        above = [max(0.0, high - y) for y, high in zip(line.y, line.high, strict=True)]
        bars: Any = {"fmt": "none", "ecolor": colour, "elinewidth": 1.2, "capsize": 3}
        axes.errorbar(line.x, line.y, [below, above], **bars)


def pareto(points: Sequence[tuple[float, float]], higher_is_better: bool) -> list[int]:
    """Return positions of the unbeaten (size, quality) points, equal ones included."""
    sign = 1 if higher_is_better else -1
    return [
        i
        for i, (x, y) in enumerate(points)
        if not any(
            (other_x <= x and sign * other_y >= sign * y) and (other_x, other_y) != (x, y)
            for other_x, other_y in points
        )
    ]


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as .svg or .png, by its suffix."""
    suffix = path.suffix.lower()
    buffer = BytesIO()
    # a date would make the same figure another file; by the creator a later run knows its own
    metadata = {
        ".svg": {"Date": None, "Creator": "headprune"},
        ".png": {"Software": "headprune"},
    }
    with style():
        figure.savefig(buffer, format=suffix[1:], dpi=DPI, metadata=metadata.get(suffix))
    write_whole(path, buffer.getvalue())
    return path


def inline_svg(figure: Figure, name: str, alt: str) -> str:
    """Return a figure as an ``<svg>`` in the page's colours; ``name`` makes its ids unique."""
    from markupsafe import escape

    buffer = StringIO()
    with style(**{"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    text = re.sub(r"^.*?<svg [^>]*(viewBox=\"[^\"]*\")[^>]*>", r"<svg \1>", text, flags=re.DOTALL)
    text = text.replace("xlink:href", "href").replace(
        "<svg ",
        f'<svg role="img" aria-label="{escape(xml_safe(alt))}" class="chart" '
        f'style="max-width:{min(900, 1.5 * 72 * figure.get_figwidth()):.0f}px" ',
        1,
    )
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda id_: id_[0] if id_[1] in used else "", text)
    for colour, name in _IN_PAGE.items():
        text = re.sub(re.escape(colour), name, text, flags=re.IGNORECASE)
    # text is set in the font of the page
    text = re.sub(r"font: (\d+ )?([\d.]+px)[^;\"]*", r"font-weight: \1; font-size: \2", text)
    return text.replace("font-weight: ;", "")
