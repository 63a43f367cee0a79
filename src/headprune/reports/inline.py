"""A matplotlib figure as SVG inside a page: its colours become the page's, its ids its own."""

from __future__ import annotations

import re
from io import StringIO
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from headprune.io import figures
from headprune.io.markup import xml_safe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SVG, _LINK = "http://www.w3.org/2000/svg", "{http://www.w3.org/1999/xlink}href"
# what the page calls the colours that figures draw with, so that a dark page redraws them
_COLOURS = {
    figures.INK: "var(--ink)",
    figures.MUTED: "var(--muted)",
    figures.GRID: "var(--grid)",
    figures.PAPER: "var(--card)",
    **{colour: f"var(--series-{i})" for i, colour in enumerate(figures.SERIES)},
}


def inline_svg(figure: Figure, prefix: str, alt: str) -> str:
    """Draws a figure as an ``<svg>`` element.

    Args:
        figure: The drawing.
        prefix: Goes before its ids, so that figures on one page do not share any.
        alt: What a screen reader says of it.
    """
    buffer = StringIO()
    with figures.style():
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    ElementTree.register_namespace("", _SVG)
    # a folder, whose name a figure has, may be called anything
    root = ElementTree.fromstring(xml_safe(buffer.getvalue()))
    for tag in ("metadata",):
        for found in root.findall(f"{{{_SVG}}}{tag}"):
            root.remove(found)
    _own_ids(root, prefix)
    for size in ("width", "height"):
        root.attrib.pop(size)
    root.attrib |= {"role": "img", "aria-label": xml_safe(alt), "class": "chart"}
    text = ElementTree.tostring(root, encoding="unicode")
    for colour, name in _COLOURS.items():
        text = re.sub(re.escape(colour), name, text, flags=re.IGNORECASE)
    # set in the font of the page
    text = re.sub(r"font: (\d+ )?([\d.]+px)[^;\"]*", r"font-weight: \1; font-size: \2", text)
    return text.replace("font-weight: ;", "")


def _own_ids(root: ElementTree.Element, prefix: str) -> None:
    """Prefixes ids that something refers to, and drops the others."""
    used = set()
    for element in root.iter():
        for name, value in element.attrib.items():
            used |= set(re.findall(r"url\(#([^)]+)\)", value))
            if name == _LINK:
                used.add(value.removeprefix("#"))
    for element in root.iter():
        for name, value in list(element.attrib.items()):
            if name == "id":
                if value in used:
                    element.set(name, f"{prefix}-{value}")
                else:
                    del element.attrib[name]
            elif name == _LINK:
                # plain href: browsers have it, and no namespace has to be declared
                del element.attrib[name]
                inside = value.startswith("#")  # others are pixels
                element.set("href", f"#{prefix}-{value[1:]}" if inside else value)
            elif "url(#" in value:
                element.set(name, value.replace("url(#", f"url(#{prefix}-"))
