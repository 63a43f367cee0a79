"""Reference tables of families, criteria and merges, read from their registries."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from headprune.console.models import families_markdown
from headprune.evidence.criteria import CRITERIA
from headprune.family.capabilities import capabilities
from headprune.surgery.merges import MERGES, NEEDS_CALIBRATION

# the measurement behind each need, for readers; a new need must be named here
_NEEDS = {
    "gradients": "a loss and its gradients",
    "curvature": "a loss and its gradients",
    "losses": "a loss, one pass per unit",
    "activations": "text",
    "gram": "text",
    "attention": "text, with attention weights",
    "gates": "trained gates (`--gates DIR`)",
}


def families() -> str:
    """The table that ``headprune families --markdown`` prints."""
    return families_markdown(capabilities())


def criteria() -> str:
    """A table of all criteria, then a section for each with the docstring of its file."""
    rows, sections = [], []
    for name, criterion in CRITERIA.items():
        needs = "; ".join(dict.fromkeys(_NEEDS[need] for need in sorted(criterion.needs)))
        refit = "yes" if criterion.assumes_refit else ""
        rows.append(f"| [`{name}`](#{name}) | {criterion.sees} | {needs or 'nothing'} | {refit} |")
        text = _docstring(f"headprune.evidence.criteria.{name.replace('-', '_')}")
        source = f"Source: {_escaped(criterion.source)}."
        sections.append(f"## `{name}` {{ #{name} }}\n\n{text}\n\n{source}")
    head = "| criterion | lowest score | needs | assumes a refit |\n| --- | --- | --- | --- |"
    return "\n\n".join(["\n".join([head, *rows]), *sections])


def merges() -> str:
    """A table of all merges, then a section for each with the docstring of its file."""
    rows, sections = [], []
    for name in MERGES:
        text = _docstring(f"headprune.surgery.merges.{name.replace('-', '_')}")
        first = " ".join(text.split("\n\n")[0].split())
        needs = "yes" if name in NEEDS_CALIBRATION else ""
        rows.append(f"| [`{name}`](#{name}) | {first} | {needs} |")
        sections.append(f"## `{name}` {{ #{name} }}\n\n{text}")
    head = "| merge | shared K and V | needs text |\n| --- | --- | --- |"
    return "\n\n".join(["\n".join([head, *rows]), *sections])


def _docstring(module: str) -> str:
    found: Any = sys.modules[module]
    return _escaped(inspect.cleandoc(found.__doc__))


def _escaped(text: str) -> str:
    """Docstrings are plain text: the characters that Markdown would take as markup, as they are.

    Lines that are indented are formulas, which Markdown leaves alone.
    """
    lines = []
    for line in text.splitlines():
        plain = line.startswith("    ")
        lines.append(line if plain else line.replace("|", "\\|").replace("*", "\\*"))
    return "\n".join(lines)
