"""Blocks as one self-contained HTML file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from headprune._version import __version__
from headprune.io.figures import inline_svg
from headprune.io.markup import xml_safe
from headprune.render.blocks import Block, Chart, Code, Paragraph, Section, Table, Tile

if TYPE_CHECKING:
    from headprune.render.runs import ReportedRun


def report_page(
    title: str,
    heads: Sequence[tuple[ReportedRun, Sequence[Tile]]],
    shared: Sequence[Block],
    own: Sequence[Sequence[Block]],
) -> str:
    """Return the report page.

    Args:
        title: Its title.
        heads: The runs with their headline numbers.
        shared: Blocks about all runs.
        own: Blocks per run.
    """
    number = iter(range(1_000_000))

    def svg(chart: Chart) -> Markup:
        return Markup(inline_svg(chart.figure, f"f{next(number)}", chart.alt))

    return page(
        "page.html.jinja",
        title=title,
        heads=heads,
        shared=shared,
        own=own,
        svg=svg,
        css=Markup(template("page.css")),
        script=Markup(template("page.js")),
    )


def page(name: str, **content: Any) -> str:
    """Return a page from its template."""
    environment = Environment(
        loader=FunctionLoader(template),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["script_json"] = script_json
    environment.filters["kind"] = _kind
    return xml_safe(environment.get_template(name).render(version=__version__, **content))


def _kind(block: Block) -> str:
    kinds = {Table: "table", Paragraph: "text", Code: "code", Chart: "chart", Section: "section"}
    return kinds.get(type(block), "map")


def template(name: str) -> str:
    """Return the text of a file in ``templates``."""
    return (files("headprune.render") / "templates" / name).read_text(encoding="utf-8")


def script_json(content: Any) -> Markup:
    """Return JSON that cannot end its script element."""
    text = json.dumps(content, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
