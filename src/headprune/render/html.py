"""Blocks as one self-contained HTML file."""

from __future__ import annotations

import json
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from headprune._version import __version__
from headprune.errors import HeadpruneError
from headprune.io.figures import inline_svg
from headprune.io.markup import xml_safe
from headprune.render.blocks import Block, Chart, Code, Paragraph, Section, Table


def refuse_other_suffix(output: Path) -> None:
    """Raise HeadpruneError for an output that is no HTML file."""
    if output.is_dir() or output.suffix.lower() not in (".html", ".htm"):
        raise HeadpruneError(f"'{output}': the output is a page; name an .html file.")


def page(name: str, *, style: str, script: str, **content: Any) -> str:
    """Return a page from its template, its style and its script."""
    number = count()

    def svg(chart: Chart) -> Markup:
        return Markup(inline_svg(chart.figure, f"f{next(number)}", chart.alt))

    environment = Environment(
        loader=FunctionLoader(template),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["script_json"] = script_json
    environment.filters["kind"] = _kind
    content |= {"version": __version__, "svg": svg, "css": Markup(style), "script": Markup(script)}
    return xml_safe(environment.get_template(name).render(**content))


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
