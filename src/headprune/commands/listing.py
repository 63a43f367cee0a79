"""The commands as ``headprune --help`` lists them, read from their files.

Importing all of them takes a second; the one that runs is imported.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Panel(str, Enum):
    """A group of commands in ``headprune --help``, in its order."""

    CHOOSE = "Choose heads"
    CUT = "Make a model smaller"
    JUDGE = "Prove and measure"
    SERVE = "Serve it"


@dataclass(frozen=True)
class Listed:
    """A command in the list.

    Attributes:
        name: Its name at the command line.
        module: Its module.
        panel: Its group.
        summary: The first line of its docstring.
    """

    name: str
    module: str
    panel: Panel
    summary: str


@functools.cache
def listed() -> dict[str, Listed]:
    """Return the commands by name, in the order of ``headprune --help``."""
    each = (one for file in Path(__file__).parent.glob("*.py") for one in _commands_in(file))
    panels = list(Panel)
    ordered = sorted(each, key=lambda one: (panels.index(one.panel), one.name))
    return {one.name: one for one in ordered}


def _commands_in(file: Path) -> Iterator[Listed]:
    """Yield the functions with the decorator ``@command(Panel.GROUP, ...)``."""
    for node in ast.parse(file.read_bytes()).body:
        for decorator in getattr(node, "decorator_list", ()):
            match decorator:
                case ast.Call(
                    func=ast.Name(id="command"),
                    args=[ast.Attribute(value=ast.Name(id="Panel"), attr=panel), *_],
                ):
                    assert isinstance(node, ast.FunctionDef)
                    summary = str(ast.get_docstring(node)).splitlines()[0]
                    module = f"{__package__}.{file.stem}"
                    yield Listed(node.name.replace("_", "-"), module, Panel[panel], summary)
