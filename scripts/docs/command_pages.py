"""The reference page of every command, read from the typer app: one row per option."""

from __future__ import annotations

import enum
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import typer
from typer.models import ArgumentInfo, OptionInfo

from headprune.cli.app import app

_VALUES = {str: "TEXT", int: "INTEGER", float: "NUMBER"}


def names() -> list[str]:
    """The commands in the order in which ``headprune --help`` lists them."""
    return list(_callbacks())


def page(name: str) -> str:
    """The page of a command, in Markdown."""
    callback = _callbacks()[name]
    arguments, options = [], []
    for parameter, hint in _parameters(callback):
        (info,) = (x for x in hint.__metadata__ if isinstance(x, OptionInfo | ArgumentInfo))
        if not getattr(info, "hidden", False):
            is_option = isinstance(info, OptionInfo)
            (options if is_option else arguments).append(_row(parameter, hint.__origin__, info))
    usage = " ".join(["headprune", name, *(row[0].strip("`") for row in arguments), "[OPTIONS]"])
    parts = [f"# headprune {name}", inspect.getdoc(callback) or "", f"```text\n{usage}\n```"]
    if arguments:
        rows = [(row[0], row[3]) for row in arguments]
        parts += ["## Arguments", _table(("argument", "meaning"), rows)]
    parts += ["## Options", _table(("option", "value", "default", "meaning"), options)]
    return "\n\n".join(parts) + "\n"


def _callbacks() -> dict[str, Callable[..., None]]:
    return {str(c.name): c.callback for c in app.registered_commands if c.callback is not None}


def _parameters(callback: Callable[..., None]) -> Iterator[tuple[inspect.Parameter, Any]]:
    hints = typing.get_type_hints(callback, include_extras=True)
    for parameter in inspect.signature(callback).parameters.values():
        if hints[parameter.name] is not typer.Context:
            yield parameter, hints[parameter.name]


def _row(
    parameter: inspect.Parameter, kind: Any, info: OptionInfo | ArgumentInfo
) -> tuple[str, str, str, str]:
    if isinstance(info, ArgumentInfo):
        shown = f"`{info.metavar or parameter.name.upper()}`"
        return shown, "", "", _cell(info.help)
    # within Annotated, Option's first argument, called default, is the first declaration
    given = [info.default, *(info.param_decls or ())]
    texts = [text for text in given if isinstance(text, str) and text.startswith("-")]
    declared = [part for text in texts for part in text.split("/")]  # "--yes/--no"
    plain = parameter.name.strip("_").replace("_", "-")
    both = [f"--{plain}", f"--no-{plain}"] if kind is bool else [f"--{plain}"]
    declared = declared or both
    value, several = _value(kind, info)
    default = parameter.default
    if default is inspect.Parameter.empty:
        default = "required"
    elif default in (None, False, (), ""):
        default = ""
    else:
        default = f"`{default.value if isinstance(default, enum.Enum) else default}`"
    if several:
        value += ", repeatable"
    shown = ", ".join(f"`{text}`{{ .option }}" for text in declared)
    return shown, value, default, _cell(info.help)


def _value(kind: Any, info: OptionInfo) -> tuple[str, bool]:
    """The kind of value that an option takes, and whether it may be given several times."""
    several = False
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        (kind,) = (part for part in typing.get_args(kind) if part is not type(None))
    if typing.get_origin(kind) is list:
        several, (kind,) = True, typing.get_args(kind)
    if kind is bool:
        return "", False
    if info.metavar:
        return f"`{info.metavar}`", several
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return ", ".join(f"`{member.value}`" for member in kind), several
    return f"`{_VALUES.get(kind, 'PATH')}`", several


def _cell(text: str | None) -> str:
    """A help text in a cell of a Markdown table; rich's escaped brackets are brackets."""
    return " ".join((text or "").replace("\\[", "[").split()).replace("|", "\\|")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
