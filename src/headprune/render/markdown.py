"""Blocks as Markdown: model card and step summary of CI."""

from __future__ import annotations

import re

from headprune.io.markup import inert, printable, xml_safe
from headprune.render.blocks import Code, Page, Paragraph, Section, Table


def markdown(page: Page, level: int = 2) -> str:
    """Return text, tables and sections as Markdown, names escaped, headings from a level on."""
    blocks = []
    for block in page:
        if isinstance(block, Table):
            blocks.append(table(block))
        elif isinstance(block, Paragraph):
            tone = f"**{block.tone}:** " if block.tone else ""
            blocks.append(tone + escaped(block.words))
        elif isinstance(block, Code):
            title = f"{block.title}\n\n" if block.title else ""
            blocks.append(f"{title}```{block.language}\n{inert(block.text)}\n```")
        elif isinstance(block, Section):
            heading = f"{'#' * level} {escaped(block.title)}"
            blocks.append(f"{heading}\n\n{markdown(block.blocks, level + 1)}")
    return "\n\n".join(blocks)


def table(block: Table) -> str:
    """Return a Markdown table with escaped cells."""
    rule = ["---" if n < block.names else "---:" for n in range(len(block.columns))]
    head, *body = ([escaped(cell) for cell in row] for row in (block.columns, *block.rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))


def line_of_code(text: str) -> str:
    """Return text on one line that cannot end a block of code."""
    return printable(text).replace("`", "'")


def escaped(text: str) -> str:
    """Return text that Markdown and HTML show as it is."""
    text = xml_safe(text)
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~$])", r"\\\1", " ".join(text.split()))
