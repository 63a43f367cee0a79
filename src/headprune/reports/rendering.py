"""Templates of pages, and what may stand in them."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined


def environment(autoescape: bool) -> Environment:
    """What fills in templates."""
    return Environment(
        loader=FunctionLoader(template),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def template(name: str) -> str:
    """The text of a template, of a style or of a script."""
    return (files("headprune.reports") / "templates" / name).read_text(encoding="utf-8")


def script_json(content: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(content, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
