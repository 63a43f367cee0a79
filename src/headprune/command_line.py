"""A command at the command line: typer's options are made of its parameters."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
import typer.main
import yaml
from rich.markup import escape
from typer.core import TyperCommand
from typer.models import ArgumentInfo, CommandInfo, OptionInfo

from headprune import terminal
from headprune.commands.command import Command
from headprune.config.base import flag
from headprune.errors import HeadpruneError
from headprune.io.parsing import parse_yaml, read_yaml
from headprune.io.writing import is_there
from headprune.registry import did_you_mean

_METAVARS = {int: "INTEGER", float: "NUMBER", Path: "PATH", str: "TEXT"}


class _Command(TyperCommand):
    """Shows arguments as they are declared; typer puts braces around them."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line."""
        arguments = [p for p in self.params if p.param_type_name == "argument"]
        return [
            "[OPTIONS]",
            *(str(p.metavar) if p.required else f"[{p.metavar}]" for p in arguments),
        ]


def at_the_command_line(command: Command) -> Any:
    """Return a command as typer runs it."""
    info = CommandInfo(command.name, cls=_Command, callback=_callback(command))
    return typer.main.get_command_from_info(
        info, pretty_exceptions_short=True, rich_markup_mode="rich"
    )


def kinds(annotation: Any) -> list[Any]:
    """The plain types of an annotation."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return kinds(get_args(annotation)[0])
    if origin is Union or isinstance(annotation, types.UnionType):
        return [kind for part in get_args(annotation) for kind in kinds(part)]
    return [] if annotation is type(None) else [annotation]


def values_of(annotation: Any) -> list[str]:
    """The values of an option, where they are few."""
    return [v for kind in kinds(annotation) if get_origin(kind) is Literal for v in get_args(kind)]


def is_several(annotation: Any) -> bool:
    """Return whether an option may be repeated."""
    return any(get_origin(kind) not in (None, Literal) for kind in kinds(annotation))


def metavar_of(parameter: inspect.Parameter, info: OptionInfo | ArgumentInfo) -> str:
    """Return the placeholder of a value in the help."""
    kind = kinds(parameter.annotation)[0]
    return info.metavar or "|".join(values_of(parameter.annotation)) or _METAVARS.get(kind, "TEXT")


def _parameter(
    name: str, parameter: inspect.Parameter, info: OptionInfo | ArgumentInfo
) -> inspect.Parameter:
    """The same for typer: a flag, or text that the function reads, as from Python."""
    default: Any = parameter.default
    plain: Any = list[str] if is_several(parameter.annotation) else str
    if kinds(parameter.annotation) == [bool]:
        plain = bool
    elif isinstance(default, tuple):
        default = list(map(str, default)) or None
    elif default is not None and default is not parameter.empty:
        default = str(default)
    more: dict[str, Any] = {
        "help": escape(info.help or ""),
        "rich_help_panel": info.rich_help_panel,
    }
    described: Any
    if isinstance(info, ArgumentInfo):
        described = typer.Argument(metavar=info.metavar, show_default=False, **more)
    else:
        spelt = flag(name)
        spelt += f"/--no-{spelt[2:]}" if default is True else ""
        metavar = None if plain is bool else metavar_of(parameter, info)
        described = typer.Option(spelt, metavar=metavar, **more)
    if default is None:
        plain = plain | None
    return _keyword(name, Annotated[plain, described], default)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _callback(command: Command) -> Callable[..., None]:
    """The function that typer calls, with the signature that it reads."""

    def call(context: typer.Context, **values: Any) -> None:
        as_json = values.pop("json_", False)
        values.pop("config", None)
        words = {name: v for name, v in values.items() if _is_given(context, name)}
        _run(command, {**context.meta.get("headprune", {}), **words}, as_json)

    parameters = [_keyword("context", typer.Context, inspect.Parameter.empty)]
    parameters += [_parameter(name, *each) for name, each in command.options().items()]
    if command.as_json is not None:
        text = "Print machine-readable JSON on stdout."
        described = typer.Option("--json", help=text, rich_help_panel="Output")
        parameters.append(_keyword("json_", Annotated[bool, described], False))
    if command.config:

        def read(context: typer.Context, given: list[str] | None) -> list[str] | None:
            _use_settings(context, command, given or [])
            return given

        text = "YAML file with options of this command, or NAME=VALUE; options given here win."
        described = typer.Option(
            help=text,
            rich_help_panel="Advanced",
            is_eager=True,
            callback=read,
            metavar="FILE",
        )
        parameters.append(_keyword("config", Annotated[list[str] | None, described], None))
    call.__dict__["__signature__"] = inspect.Signature(parameters)
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    call.__doc__, call.__name__ = command.run.__doc__, command.name
    return call


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _use_settings(context: typer.Context, command: Command, given: list[str]) -> None:
    """Use settings for options that the command line leaves open; typer need not read them."""
    settings: dict[str, Any] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if equals and not is_there(each):
            settings |= _known({name.replace("-", "_"): _value(each, value)}, command)
        else:
            settings |= settings_in(Path(each), command)
    context.meta["headprune"] = settings
    several = {n for n, (p, _) in command.options().items() if is_several(p.annotation)}
    context.default_map = {n: [str(v)] if n in several else str(v) for n, v in settings.items()}


def _value(given: str, text: str) -> Any:
    """The value of NAME=VALUE, as YAML reads it."""
    try:
        return parse_yaml(text)
    except (ValueError, RecursionError, yaml.YAMLError):
        raise HeadpruneError(f"--config {given}: what follows '=' is no YAML.") from None


def settings_in(path: Path, command: Command) -> dict[str, Any]:
    """Read options of a command from a YAML file.

    Raises:
        HeadpruneError: If the file is missing, or misspells an option.
    """
    try:
        content = read_yaml(path, HeadpruneError)
    except FileNotFoundError:
        raise HeadpruneError(f"--config: there is no file '{path}'.") from None
    if not isinstance(content, dict):
        raise HeadpruneError(f"--config {path}: it holds no options, as in 'seq_len: 512'.")
    return _known(content, command)


def _known(settings: dict[str, Any], command: Command) -> dict[str, Any]:
    """Return the settings without nulls; refuse one that the command does not have."""
    parameters = command.parameters()
    for name in settings:
        if name == "trust_remote_code":
            raise HeadpruneError(
                "A file cannot allow code that comes with a model: leave out 'trust_remote_code', "
                "and give --trust-remote-code if you trust that code."
            )
        if name not in parameters:
            spelt = [one for one in parameters if flag(one) == f"--{name}"]
            near = did_you_mean(spelt[0] if spelt else str(name), list(parameters))
            raise HeadpruneError(f"--config: {command.name} has no option '{name}'.{near}")
    return {name: value for name, value in settings.items() if value is not None}


def _run(command: Command, values: dict[str, Any], as_json: bool) -> None:
    terminal.quiet_libraries()
    try:
        with terminal.context() as running:
            result = command.run(**values, context=running)
    except HeadpruneError as error:
        error.args = (command.respell(str(error)),)
        command.notify(error, values, terminal.show_command)
        raise
    terminal.warn(command.warnings(result))
    if as_json and command.as_json is not None:
        terminal.show_json(command.as_json(result))
    else:
        command.show(terminal.out, result, command.arguments(values))
    command.notify(result, values, terminal.show_command)
    if code := command.exit_code(result):
        raise typer.Exit(code)
