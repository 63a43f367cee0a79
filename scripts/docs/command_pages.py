"""The reference page of every command, from its function: one row per option."""

from __future__ import annotations

import inspect
from typing import Any

from typer.models import ArgumentInfo

from headprune.command_line import is_several, metavar_of
from headprune.commands.command import Command, all_commands, named
from headprune.config.base import flag

_ROWS = {
    "Output": ("`--json`{ .option }", "", "", "Print machine-readable JSON on stdout."),
    "Advanced": (
        "`--config`{ .option }",
        "`FILE`",
        "",
        "YAML file with options of this command, or NAME=VALUE; options given here win.",
    ),
}


def names() -> list[str]:
    """The commands in the order of ``headprune --help``."""
    return list(all_commands())


def page(name: str) -> str:
    """The page of a command, in Markdown."""
    command = named(name)
    arguments = {n: i for n, (_, i) in command.options().items() if isinstance(i, ArgumentInfo)}
    usage = f"{_call(command)} [OPTIONS]"
    parts = [f"# headprune {name}", inspect.getdoc(command.run) or "", f"```text\n{usage}\n```"]
    rows = [(f"`{info.metavar}`", _cell(info.help)) for info in arguments.values()]
    if rows:
        parts += ["## Arguments", _table(("argument", "meaning"), rows)]
    for panel in ("Options", "Calibration", "Training", "Output", "Advanced"):
        options = [
            _row(n, parameter, info)
            for n, (parameter, info) in command.options().items()
            if (info.rich_help_panel or "Options") == panel and n not in arguments
        ]
        if (command.config and panel == "Advanced") or (command.as_json and panel == "Output"):
            options.append(_ROWS[panel])
        if options:
            parts += [f"## {panel}", _table(("option", "value", "default", "meaning"), options)]
    parts.append("## In Python")
    if command.config:
        parts.append("Arguments that are no options above are set here, or by `--config`.")
    parts.append(f"```python\n{_python(command)}\n```")
    return "\n\n".join(parts) + "\n"


def commands() -> str:
    """The commands, and what each does."""
    rows = [
        (command.panel.value, f"[`{_call(command)}`]({command.name}.md)", _purpose(command))
        for command in all_commands().values()
    ]
    return _table(("", "command", "purpose"), rows)


def functions() -> str:
    """The functions, and their pages."""
    rows = []
    for command in all_commands().values():
        by_place = inspect.Parameter.POSITIONAL_OR_KEYWORD
        first = [n for n, p in command.parameters().items() if p.kind is by_place]
        call = f"`headprune.{command.run.__name__}({', '.join([*first, '...'])})`"
        rows.append((f"[{call}](commands/{command.name}.md)", _purpose(command)))
    return _table(("function", "what it does"), rows)


def _call(command: Command) -> str:
    words = [
        str(info.metavar) if parameter.default is parameter.empty else f"[{info.metavar}]"
        for parameter, info in command.options().values()
        if isinstance(info, ArgumentInfo)
    ]
    return " ".join(["headprune", command.name, *words])


def _purpose(command: Command) -> str:
    return _cell((inspect.getdoc(command.run) or "").partition("\n")[0])


def _python(command: Command) -> str:
    """The call with all its arguments, a line each."""
    lines = [f"headprune.{command.run.__name__}("]
    star = False
    for name, parameter in command.parameters().items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not star:
            lines, star = [*lines, "    *,"], True
        required = parameter.default is inspect.Parameter.empty
        lines.append(f"    {name}{'' if required else f'={parameter.default!r}'},")
    return "\n".join([*lines, ")"])


def _row(name: str, parameter: inspect.Parameter, info: Any) -> tuple[str, str, str, str]:
    default = "" if parameter.default in (None, False, ()) else f"`{parameter.default}`"
    if parameter.default is inspect.Parameter.empty:
        default = "required"
    elif isinstance(parameter.default, tuple) and parameter.default:
        default = f"`{','.join(map(str, parameter.default))}`"
    value = f"`{metavar_of(parameter, info)}`".replace("|", "`, `")
    if "bool" in str(parameter.annotation):
        value = ""
    value += ", repeatable" if is_several(parameter.annotation) else ""
    spelt = f"`{flag(name)}`{{ .option }}"
    spelt += f", `--no-{flag(name)[2:]}`{{ .option }}" if parameter.default is True else ""
    return spelt, value, default, _cell(info.help)


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _table(head: tuple[str, ...], rows: list[Any]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
