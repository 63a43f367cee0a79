"""The reference page of every command, from its declaration: one row per option."""

from __future__ import annotations

import enum
import inspect
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from headprune.cli.adapter import kind_of, values_of
from headprune.declaration import COMMANDS, Command, Panel, appearance, flags

_VALUES = {str: "TEXT", int: "INTEGER", float: "NUMBER", Path: "PATH"}
_EVERYWHERE = (
    (
        "`--config`{ .option }",
        "`PATH`",
        "",
        "YAML whose section of the command's name has settings.",
    ),
    ("`--json`{ .option }", "", "", "Print machine-readable JSON on stdout."),
)


def names() -> list[str]:
    """The commands in the order in which ``headprune --help`` lists them."""
    return [command.name for command in Command.listed()]


def page(name: str) -> str:
    """The page of a command, in Markdown."""
    command = COMMANDS[name]
    fields = dict(command.fields())
    arguments = {n: info for n, info in fields.items() if appearance(info).positional}
    metavars = [_metavar(n, info) for n, info in arguments.items()]
    usage = " ".join(["headprune", name, *metavars, "[OPTIONS]"])
    parts = [f"# headprune {name}", inspect.getdoc(command.options) or "", f"```text\n{usage}\n```"]
    if arguments:
        texts = [_cell(info.description) for info in arguments.values()]
        shown = [f"`{metavar}`" for metavar in metavars]
        parts += [
            "## Arguments",
            _table(("argument", "meaning"), list(zip(shown, texts, strict=True))),
        ]
    for panel in Panel:
        rows = [
            _row(n, info)
            for n, info in fields.items()
            if appearance(info).panel is panel and n not in arguments
        ]
        rows += _EVERYWHERE if panel is Panel.ADVANCED else ()
        if rows:
            parts += [f"## {panel.value}", _table(("option", "value", "default", "meaning"), rows)]
    parts += ["## In Python", f"```python\n{_python(command)}\n```"]
    return "\n\n".join(parts) + "\n"


def commands() -> str:
    """The commands, and what each does."""
    rows = []
    for command in Command.listed():
        fields = dict(command.fields())
        metavars = [_metavar(n, i) for n, i in fields.items() if appearance(i).positional]
        call = " ".join(["headprune", command.name, *metavars])
        rows.append((command.chapter.value, f"[`{call}`]({command.name}.md)", _purpose(command)))
    return _table(("", "command", "purpose"), rows)


def _metavar(name: str, info: FieldInfo) -> str:
    return appearance(info).metavar or name.upper()


def _purpose(command: Command[Any, Any]) -> str:
    return _cell((inspect.getdoc(command.options) or "").partition("\n")[0])


def functions() -> str:
    """The functions with what they take by place, and their pages."""
    rows = []
    for command in Command.listed():
        parameters = command.signature().parameters.values()
        first = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        call = f"`headprune.{command.section}({', '.join([*first, '...'])})`"
        rows.append((f"[{call}](commands/{command.name}.md)", _purpose(command)))
    return _table(("function", "what it does"), rows)


def _python(command: Command[Any, Any]) -> str:
    """The call with all its settings, a line each, where they have defaults."""
    lines = [f"headprune.{command.section}("]
    star = False
    for parameter in command.signature().parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not star:
            lines, star = [*lines, "    *,"], True
        default = parameter.default
        if isinstance(default, enum.Enum | Path):
            default = default.value if isinstance(default, enum.Enum) else str(default)
        given = "" if default is inspect.Parameter.empty else f"={default!r}"
        lines.append(f"    {parameter.name}{given},")
    return "\n".join([*lines, ")"])


def _row(name: str, info: FieldInfo) -> tuple[str, str, str, str]:
    default: Any = "required" if info.is_required() else ""
    if not info.is_required() and info.default not in (None, False, (), ""):
        value = info.default.value if isinstance(info.default, enum.Enum) else info.default
        value = ",".join(map(str, value)) if isinstance(value, tuple) else value
        default = f"`{value}`"
    shown = ", ".join(f"`{flag}`{{ .option }}" for flag in flags(name, info))
    return shown, _value(info), default, _cell(info.description)


def _value(info: FieldInfo) -> str:
    """The kind of value that an option takes, and whether it may be given several times."""
    kind, several = kind_of(info)
    metavar = appearance(info).metavar
    if kind is bool:
        return ""
    if metavar:
        value = f"`{metavar}`"
    elif values_of(info):
        value = ", ".join(f"`{each}`" for each in values_of(info))
    else:
        value = f"`{_VALUES[kind]}`"
    return f"{value}, repeatable" if several else value


def _cell(text: str | None) -> str:
    """A help text in a cell of a Markdown table."""
    return " ".join((text or "").split()).replace("|", "\\|")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
