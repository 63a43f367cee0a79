"""Blocks as Markdown: model card, summary for a pull request, step summary of CI."""

from __future__ import annotations

import re

from headprune.io.markup import inert, printable, xml_safe
from headprune.render.blocks import Block, Chart, Code, Page, Paragraph, Section, Table


def markdown(page: Page, level: int = 2) -> str:
    """Return the page as Markdown, names escaped, headings from a level on."""
    return "\n\n".join(filter(None, (_block(block, level) for block in page)))


def _block(block: Block, level: int) -> str:
    if isinstance(block, Table):
        return table(block)
    if isinstance(block, Paragraph):
        return (f"**{block.tone}:** " if block.tone else "") + escaped(block.words)
    if isinstance(block, Code):
        title = f"{block.title}\n\n" if block.title else ""
        return f"{title}```{block.language}\n{inert(block.text)}\n```"
    if isinstance(block, Section):
        inside = markdown(block.blocks, level + 1)
        if block.folded:
            return f"<details><summary>{escaped(block.title)}</summary>\n\n{inside}\n\n</details>"
        return f"{'#' * level} {escaped(block.title)}\n\n{inside}"
    if isinstance(block, Chart):
        section = Section(block.title, (block.table, Paragraph(block.note)), folded=True)
    else:  # a map of heads
        section = Section(
            block.title, (Paragraph(block.key), Code(block.lines(), "text")), folded=True
        )
    return _block(section, level)


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
