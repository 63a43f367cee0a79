"""The page and the Markdown form, from templates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from headprune._version import __version__
from headprune.exporting import card
from headprune.exporting.role_rows import ROLE_COLUMNS
from headprune.io.markup import xml_safe
from headprune.reports import charts, words
from headprune.reports.charts import Chart
from headprune.reports.inline import inline_svg
from headprune.reports.rendering import environment, script_json, template
from headprune.reports.view import HeadMap, ShownRun

CELL, GAP = 18, 3  # of the head map, in its own units
WIDE = 16  # heads; with more of them the map gets the width of the page, and larger labels


@dataclass(frozen=True)
class Contents:
    """What is drawn: charts that show all runs, and those of each.

    Attributes:
        runs: The runs.
        shared: Charts with all of them.
        own: Charts of every run, in order.
    """

    runs: Sequence[ShownRun]
    shared: Sequence[Chart]
    own: Sequence[Sequence[Chart]]


def contents(runs: Sequence[ShownRun]) -> Contents:
    """Draws the charts."""
    shared = [*charts.quality_charts(runs), charts.cache_chart(runs), charts.speed_chart(runs)]
    drawn = [chart for chart in shared if chart is not None]
    own = [[*charts.training_charts(run), *charts.roles_charts(run)] for run in runs]
    return Contents(runs, drawn, own)


def html(drawn: Contents) -> str:
    """The page: one file, nothing from elsewhere."""
    number = iter(range(1_000_000))
    return xml_safe(
        environment(autoescape=True)
        .get_template("page.html.jinja")
        .render(
            runs=drawn.runs,
            shared=drawn.shared,
            own=drawn.own,
            words=words,
            card=card,
            role_columns=ROLE_COLUMNS,
            title=_title(drawn.runs),
            version=__version__,
            css=Markup(template("page.css")),
            script=Markup(template("page.js")),
            svg=lambda chart: Markup(inline_svg(chart.figure, f"f{next(number)}", chart.alt)),
            map=map_geometry,
            data=lambda head_map: Markup(script_json(map_data(head_map))),
        )
    )


def markdown(drawn: Contents) -> str:
    """The same in short, for a pull request."""
    return xml_safe(
        environment(autoescape=False)
        .get_template("summary.md.jinja")
        .render(
            runs=drawn.runs,
            shared=drawn.shared,
            own=drawn.own,
            words=words,
            card=card,
            role_columns=ROLE_COLUMNS,
            table=card.markdown_table,
            text=card.markdown_text,
            title=_title(drawn.runs),
            version=__version__,
            lines=head_lines,
        )
    )


def _title(runs: Sequence[ShownRun]) -> str:
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs"


def map_geometry(drawn: HeadMap) -> dict[str, Any]:
    """Where the cells of a head map lie, in its own units."""
    step = CELL + GAP
    columns = max((len(layer.cells) for layer in drawn.layers), default=0)
    wide = columns > WIDE
    longest = max((len(layer.label) for layer in drawn.layers), default=0)
    label = min(max(8 + (10 if wide else 7) * longest, 24), 200)
    cells, right = [], 0
    low, high = _scale(drawn)
    for y, layer in enumerate(drawn.layers):
        for x, cell in enumerate(layer.cells):
            gaps = x // layer.group * 5 if layer.group > 1 else 0
            left = label + x * step + gaps
            strength = _strength(cell.evidence, low, high) if drawn.evidence else 0.75
            cells.append((left, 18 + y * step, cell.state[0], strength))
            right = max(right, left + CELL)
    return {
        "cells": cells,
        "labels": [(layer.label, 18 + y * step + 13) for y, layer in enumerate(drawn.layers)],
        "label_width": label,
        "width": right + 4,
        "height": 18 + len(drawn.layers) * step + 2,
        "columns": columns,
        "wide": wide,
        "kept": sum(layer.kept for layer in drawn.layers),
        "heads": sum(len(layer.cells) for layer in drawn.layers),
    }


def _scale(drawn: HeadMap) -> tuple[float, float]:
    """The evidence that is drawn palest, and darkest: that of a probability is 0 and 1."""
    values = [c.evidence for layer in drawn.layers for c in layer.cells if c.evidence is not None]
    known = [value for value in values if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)


def _strength(value: float | None, low: float, high: float) -> float:
    if value is None or not math.isfinite(value):
        return 0.0
    return round((value - low) / (high - low), 3) if high > low else 0.5


def map_data(drawn: HeadMap) -> dict[str, Any]:
    """What the page tells of a head that is pointed at."""
    names = list(dict.fromkeys(n for x in drawn.layers for c in x.cells for n, _ in c.facts))
    cells = [
        [y, cell.head, cell.state[0], [dict(cell.facts).get(name) for name in names]]
        for y, layer in enumerate(drawn.layers)
        for cell in layer.cells
    ]
    paths = [layer.path for layer in drawn.layers]
    return {"paths": paths, "names": names, "cells": cells}


def head_lines(drawn: HeadMap) -> str:
    """The map as text: one line per layer."""
    signs = {"kept": card.KEPT, "removed": card.GONE, "earlier": " ", "scored": card.KEPT}
    width = max((len(card.line_text(layer.label)) for layer in drawn.layers), default=0)
    lines = []
    for layer in drawn.layers:
        drawn_heads = "".join(signs[cell.state] for cell in layer.cells)
        group = layer.group if layer.group > 1 else len(drawn_heads) or 1
        parts = [drawn_heads[at : at + group] for at in range(0, len(drawn_heads), group)]
        lines.append(f"{card.line_text(layer.label):<{width}}  {' '.join(parts)}".rstrip())
    return "\n".join(lines)
