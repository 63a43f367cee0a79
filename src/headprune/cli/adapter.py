"""From the declaration of a command to its options at the command line."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from rich.markup import escape
from typer.core import TyperCommand

from headprune.cli import terminal
from headprune.cli.settings import read_settings
from headprune.declaration import Command, Door, Options, appearance, flags, retold
from headprune.errors import HeadpruneError

_CONFIG, _JSON = "config_file", "json_"  # parameters that are no options of a command


def add(app: typer.Typer, command: Command[Any, Any]) -> None:
    """Adds a command to the application."""
    panel = command.chapter.value
    app.command(command.name, cls=_Command, rich_help_panel=panel)(callback(command))


class _Command(TyperCommand):
    """Shows arguments as they are declared; typer brackets all that may come from a file."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line."""
        arguments = (p.metavar for p in self.params if p.param_type_name == "argument")
        return ["[OPTIONS]", *map(str, arguments)]


def callback(command: Command[Any, Any]) -> Callable[..., None]:
    """The function that typer calls, with the signature that it reads."""

    def call(context: typer.Context, **given: Any) -> None:
        _call(command, context, given)

    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *parameters_of(command)]
    # typer builds its options from it
    call.__dict__["__signature__"] = inspect.Signature(parameters)
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    call.__doc__ = command.options.__doc__
    call.__name__ = command.name
    return call


def parameters_of(command: Command[Any, Any]) -> Iterator[inspect.Parameter]:
    """A parameter for every option, with those that all commands have."""
    for name, info in command.fields():
        yield _parameter(name, info)
    yield _named(
        _CONFIG,
        Path | None,
        None,
        typer.Option(
            "--config",
            help=f"YAML whose section '{command.section}' has settings; options given here win.",
            rich_help_panel="Advanced",
        ),
    )
    described = typer.Option("--json", help="Print machine-readable JSON on stdout.")
    described.rich_help_panel = "Output"
    yield _named(_JSON, bool, False, described)


def _named(name: str, kind: Any, default: Any, described: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, described],
    )


def _parameter(name: str, info: FieldInfo) -> inspect.Parameter:
    look = appearance(info)
    kind, several = kind_of(info)
    described: Any
    text, required = escape(info.description or ""), info.is_required()
    default = None if required else _shown(info.default, look.as_text)
    if several:
        kind, default = types.GenericAlias(list, (kind,)), default or None
    # what is required may come from a file, so that its absence is told later
    text += " [red]\\[required][/]" if required else ""
    if look.positional:
        described = typer.Argument(help=text, metavar=look.metavar)
    else:
        spelt, panel = "/".join(flags(name, info)), look.panel.value
        metavar = f"<{'|'.join(values_of(info))}>" if values_of(info) else look.metavar
        described = typer.Option(spelt, help=text, metavar=metavar, rich_help_panel=panel)
    return _named(name, kind | None if default is None else kind, default, described)


def _shown(default: Any, as_text: bool) -> Any:
    if as_text and isinstance(default, tuple):
        return ",".join(map(str, default))
    if isinstance(default, Enum):
        return default.value
    return list(default) if isinstance(default, tuple) else default


def values_of(info: FieldInfo) -> list[str]:
    """The values that an option may have, where they are few."""
    kind = _bare(info.annotation)
    if get_origin(kind) is tuple:
        kind = _bare(get_args(kind)[0])
    some = isinstance(kind, type) and issubclass(kind, Enum)
    return [member.value for member in kind] if some else []


def kind_of(info: FieldInfo) -> tuple[Any, bool]:
    """The type that a word at the command line is read as, and whether there may be several.

    What is more than a word (a share or a count, a list) comes as text, and is read by the option.
    """
    kind = _bare(info.annotation)
    if appearance(info).as_text:
        return str, False
    if get_origin(kind) is tuple:
        return _plain(_bare(get_args(kind)[0])), True
    return _plain(kind), False


def _plain(kind: Any) -> Any:
    return kind if kind in (bool, int, float, Path) else str


def _bare(kind: Any) -> Any:
    """A type without ``None`` and without what is annotated."""
    if get_origin(kind) is Annotated:
        return _bare(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        parts = [part for part in get_args(kind) if part is not types.NoneType]
        return _bare(parts[0]) if len(parts) == 1 else kind
    return kind


def _call(command: Command[Any, Any], context: typer.Context, given: dict[str, Any]) -> None:
    asked_json = given.pop(_JSON)
    file = given.pop(_CONFIG)
    try:
        options = _options(command, _words(context, given), file)
        for name, info in command.options.model_fields.items():
            note = appearance(info).note(getattr(options, name))
            if note is not None:
                terminal.note(note.replace("{}", Door.OPTION.spell(name, command.options)))
        terminal.quiet_libraries()
        with terminal.context() as running:
            result = command.start(options, running)
        terminal.warn(command.warnings(result))
        if asked_json:
            terminal.show_json(command.as_json(result))
        else:
            command.show(result, options, terminal.out)
        command.tell(result, terminal.show_command)
    except HeadpruneError as error:
        told = retold(error, command.options, Door.OPTION)
        command.tell(told, terminal.show_command)
        raise told from error
    if code := command.exit_code(result):
        raise typer.Exit(code)


def _words(context: typer.Context, given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given at the command line."""
    words: dict[str, Any] = {}
    for name, value in given.items():
        source = context.get_parameter_source(name)
        if source is None or source.name == "DEFAULT":
            continue
        words[name] = value
    return words


def _options(command: Command[Any, Any], words: Mapping[str, Any], file: Path | None) -> Options:
    """What was given at the command line, else in the file; the rest has its default."""
    try:
        by_file = {} if file is None else read_settings(file, command)
    except HeadpruneError as error:
        command.refused(words, error)
        raise
    options: Options = command.asked({**by_file, **words}, Door.OPTION)
    return options
