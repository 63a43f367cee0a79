"""What ``mkdocs build`` adds to docs/: pages of commands, tables of registries, formulas.

A page holds ``<!-- generated: NAME -->`` where a table of ``GENERATED`` goes, and
``<!-- include: FILE -->`` where a file of the repository's root goes. Formulas between dollar signs
become MathML, so that the pages need no script and no network.
"""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path
from typing import Any

import latex2mathml.converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).resolve().parent))
import command_pages
import registry_tables

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {
    "families": registry_tables.families,
    "criteria": registry_tables.criteria,
    "roles": registry_tables.roles,
    "merges": registry_tables.merges,
    "metrics": registry_tables.metrics,
    "engines": registry_tables.engines,
    "formats": registry_tables.formats,
    "schemas": registry_tables.schemas,
    "functions": command_pages.functions,
    "commands": command_pages.commands,
}
_PLACE = "reference/commands/"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the pages of commands into the navigation, below their overview."""
    _commands_of(config.nav)[1:] = [{name: f"{_PLACE}{name}.md"} for name in command_pages.names()]
    return config


def _commands_of(entries: Any) -> list[Any]:
    """The navigation's list that begins with the overview of commands."""
    for entry in entries:
        for below in entry.values() if isinstance(entry, dict) else ():
            if isinstance(below, list):
                if below[0] == f"{_PLACE}index.md":
                    return below
                found = _commands_of(below)
                if found:
                    return found
    return []


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page per command."""
    for name in command_pages.names():
        files.append(File.generated(config, f"{_PLACE}{name}.md", content=command_pages.page(name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fills the places of generated tables and of included files."""
    markdown = re.sub(r"<!-- generated: (\w+) -->", lambda m: GENERATED[m[1]](), markdown)
    up = "../" * page.file.src_uri.count("/")
    return re.sub(r"<!-- include: (\S+) -->", lambda m: _included(m[1], up), markdown)


def _included(name: str, up: str) -> str:
    """A file of the root without its title; its links into docs/ lead from the page."""
    text = (ROOT / name).read_text(encoding="utf-8").partition("\n")[2]
    for file in ("SECURITY.md", "CHANGELOG.md"):
        text = text.replace(f"]({file}", f"]({up}{file.lower()}")
    return text.replace("](docs/", f"]({up}").strip()


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Formulas as MathML."""
    pattern = r'<(div|span) class="arithmatex">\\([\[(])(.*?)\\[\])]</\1>'
    return re.sub(pattern, _formula, content, flags=re.DOTALL)


def _formula(match: re.Match[str]) -> str:
    display = "block" if match[2] == "[" else "inline"
    text = " ".join(html.unescape(match[3]).split())
    return str(latex2mathml.converter.convert(text, display=display))
