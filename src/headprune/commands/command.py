"""A command is a typed function: its signature is the command line and the Python API.

An option is a parameter with ``typer.Option`` or ``typer.Argument`` in its annotation. Parameters
without are expert settings, for Python and files of ``--config``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python
from typer.models import ArgumentInfo, OptionInfo

from headprune import devices, placements
from headprune.commands.in_memory_inputs import as_files, bars_hidden
from headprune.commands.listing import Panel, listed
from headprune.config.base import flag, sentence
from headprune.context import CommandProvenance, Context
from headprune.errors import HeadpruneError

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")
R = TypeVar("R")
Values = Mapping[str, Any]
# where a result lies, and what does not change it
_APART = {"output", "overwrite", "resume", "device", "placement", "context"}
ACCESS = ("trust_remote_code", "device", "placement")  # what any command on a model needs
_TAKE_MEMORY = ("batch_size", "seq_len", "calibration_tokens", "max_new_tokens")


def _as_json(result: Any) -> str:
    if isinstance(result, BaseModel):
        return result.model_dump_json(indent=2)
    return json.dumps(result.as_json(), indent=2)


@dataclass(frozen=True)
class Command:
    """A registered command.

    Attributes:
        run: The function, as Python users call it.
        panel: Where ``--help`` lists it.
        show: Prints a result for people, given the arguments of the call.
        as_json: The result for ``--json``; None for no such option.
        config: Whether it has ``--config``.
        warnings: Sentences on a result that is likely not meant.
        exit_code: 1 where a check failed, 2 where it cannot be decided.
        together: Whether several processes can share the work.
        needs: Options without effect unless one of others ("a|b") is set, or has a value ("a=x").
        failed: Called with the arguments and an error, to mark stale output as failed.
        notify: Called at the command line with a result or an error, the arguments, and a function
            that prints a workflow command of a CI runner.
    """

    run: Callable[..., Any]
    panel: Panel
    show: Callable[[Console, Any, Values], None]
    as_json: Callable[[Any], str] | None = _as_json
    config: bool = True
    warnings: Callable[[Any], Iterable[str]] = lambda result: ()
    exit_code: Callable[[Any], int] = lambda result: 0
    together: bool = False
    needs: Mapping[str, str] | None = None
    failed: Callable[[Values, HeadpruneError], None] = lambda values, error: None
    notify: Callable[[Any, Values, Callable[[str], None]], None] = lambda result, values, say: None

    @property
    def name(self) -> str:
        """The name at the command line."""
        return self.run.__name__.replace("_", "-")

    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters with resolved annotations, without ``context``."""
        return {name: p for name, p in _parameters(self.run).items() if name != "context"}

    def options(self) -> dict[str, tuple[inspect.Parameter, OptionInfo | ArgumentInfo]]:
        """The parameters that are options or arguments, with typer's declaration of each."""
        return {
            name: (parameter, each)
            for name, parameter in self.parameters().items()
            for each in _metadata(parameter.annotation)
            if isinstance(each, OptionInfo | ArgumentInfo)
        }

    def arguments(self, values: Values) -> dict[str, Any]:
        """The arguments of a call, validated.

        Raises:
            HeadpruneError: If a value is wrong, or has no effect beside the others.
        """
        parameters = _parameters(self.run)
        validated: dict[str, Any] = {}
        for name, parameter in parameters.items():
            value = values.get(name, parameter.default)
            if name in values and name != "context" and value is not parameter.default:
                try:
                    value = _adapter(self.run, name).validate_python(value)
                except ValidationError as error:
                    raise HeadpruneError(sentence(error, called=self.spell(name))) from None
            validated[name] = value
        for name, others in (self.needs or {}).items():
            idle = validated[name] != parameters[name].default
            if idle and not any(_is_given(validated, each) for each in others.split("|")):
                pairs = (each.partition("=") for each in others.split("|"))
                without = " or ".join(f"{self.spell(o)} {value}".strip() for o, _, value in pairs)
                raise HeadpruneError(
                    f"{self.spell(name)} has no effect without {without}: give that too, or "
                    "leave it out."
                )
        return validated

    def again(
        self, values: Values, only: Collection[str] = (), but: Collection[str] = ()
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the options and settings of a call that are no defaults, as a shell spells them.

        Args:
            values: The arguments of the call.
            only: Names of some; all where it is empty.
            but: Names to leave out.
        """
        options: dict[str, Any] = {}
        settings: dict[str, Any] = {}
        for name, parameter in self.parameters().items():
            asked = (name in only or not only) and name not in but
            if asked and values[name] != parameter.default:
                value, word = values[name], flag(name).removeprefix("--")
                if name not in self.options():
                    settings[name] = value
                elif value is False:
                    options[f"no-{word}"] = True
                else:
                    options[word] = value
        return options, settings

    def spell(self, name: str) -> str:
        """Spell a parameter as users give it."""
        return flag(name) if name in self.options() else name

    def respell(self, message: str) -> str:
        """Name expert settings, which are options of other commands, as this command takes them."""
        settings = {flag(name): name for name in self.parameters() if name not in self.options()}

        def spelled(found: re.Match[str]) -> str:
            option, value = found.groups(default="")
            if option not in settings:  # another's, or a whole command
                return found[0]
            return f"--config {settings[option]}={value[1:]}" if value else settings[option]

        return re.sub(r"headprune [a-z][^']*|(--[a-z0-9-]+)( [A-Z0-9][^ ;]*)?", spelled, message)


def _is_given(values: Values, option: str) -> bool:
    name, _, value = option.partition("=")
    return values[name] == value if value else values[name] not in (None, False, (), [])


def _refuse_absent(command: Command, values: Values) -> None:
    """Refuse the name of no model, and the path of no data, before slow imports."""
    from headprune.config.data import data_config, domains
    from headprune.io.hub import refuse_absent

    for name, (_, info) in command.options().items():
        # a FOLDER may be no hub id: its command says so
        named = name in ("model", "teacher", "against") and info.metavar != "FOLDER"
        if named and values[name] is not None:
            refuse_absent(values[name])
    for name in ("data", "calibrate", "refit"):
        for each in domains(values[name]) if values.get(name) else ():
            data_config(each.source, None, None)


COMMANDS: dict[str, Command] = {}  # of the imported modules


def command(
    panel: Panel, show: Callable[[Console, Any, Values], None], **more: Any
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function as a command; ``more`` are further attributes of ``Command``."""

    def register(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            given = inspect.signature(function).bind(*args, **kwargs).arguments
            with as_files(given) as files:
                return on_files(files)

        def on_files(given: dict[str, Any]) -> R:
            try:
                values = registered.arguments(given)
                _refuse_absent(registered, values)
                context = values["context"]
                if not isinstance(context, Context):
                    raise HeadpruneError(
                        f"context must be a headprune.context.Context, not {context!r}. A length "
                        "in tokens is context_tokens, where a command has it."
                    )
                remote = bool(values.get("trust_remote_code")) or context.allowed.trust_remote_code
                context = replace(
                    context,
                    provenance=CommandProvenance(
                        command=registered.name, options=_recorded(registered, values)
                    ),
                    allowed=replace(context.allowed, trust_remote_code=remote),
                )
                with bars_hidden(), _surroundings(registered, values, context) as context:
                    return function(**{**values, "context": context})  # type: ignore[call-arg]
            except HeadpruneError as error:
                registered.failed(given, error)
                raise

        registered = Command(run, panel, show, **more)
        COMMANDS[registered.name] = registered
        return run

    return register


def named(name: str) -> Command:
    """Return a command; its module is imported."""
    importlib.import_module(listed()[name].module)
    return COMMANDS[name]


def all_commands() -> dict[str, Command]:
    """Return all commands by name, in the order of ``headprune --help``."""
    return {name: named(name) for name in listed()}


@functools.cache
def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters; results are not resolved, as their types import torch."""
    function = inspect.unwrap(function)
    annotations = {k: v for k, v in function.__annotations__.items() if k != "return"}
    bare = type("bare", (), {"__annotations__": annotations})
    hints = get_type_hints(bare, globalns=function.__globals__, include_extras=True)
    signature = inspect.signature(function)
    return {name: p.replace(annotation=hints[name]) for name, p in signature.parameters.items()}


def _metadata(annotation: Any) -> list[Any]:
    """Return the metadata of an annotation, also within ``X | None``."""
    found = list(getattr(annotation, "__metadata__", ()))
    inner = annotation.__origin__ if found else annotation
    parts = [inner] if found else get_args(inner) if get_origin(inner) is not Literal else []
    return [each for part in parts for each in _metadata(part)] + found


@functools.cache
def _adapter(function: Callable[..., Any], name: str) -> TypeAdapter[Any]:
    return TypeAdapter(_parameters(function)[name].annotation)


def _recorded(command: Command, values: Values) -> dict[str, Any]:
    """The arguments that have a part in the result; defaults that say no are left out."""
    defaults = {name: parameter.default for name, parameter in command.parameters().items()}
    kept = {
        name: value
        for name, value in values.items()
        if name not in _APART and not (_says_no(value) and value == defaults[name])
    }
    return dict(to_jsonable_python(kept))


def _says_no(value: Any) -> bool:
    """Return whether a value is None, False or empty; 0 is a number."""
    return value is None or value is False or (isinstance(value, tuple | list) and not value)


@contextmanager
def _surroundings(command: Command, values: Values, context: Context) -> Iterator[Context]:
    """Place models on the device of a call, and say in a sentence when it gives out."""
    if "device" not in values:
        yield context
        return
    stages, device = ["running"], command.spell("device")
    on_cpu = f"{device} cpu" if device.startswith("--") else f"{device}=cpu"

    def stage(name: str) -> None:
        stages.append(name)
        context.stage(name)

    placement = placements.Placement(values.get("placement", "whole"))
    with (
        devices.running_on(values["device"], context.line),
        placements.placing(placement, context.line),
        placements.sharding(values.get("shard", False)),
    ):
        try:
            yield replace(context, stage=stage)
        except Exception as error:  # a device fails with several kinds; others are raised
            if devices.device_failed(error):
                # the place says where to look if it is no chance
                context.line("".join(traceback.format_exception(error)).rstrip())
                resume = ", with --resume" if "resume" in values else ""
                raise HeadpruneError(
                    f"{devices.chosen()} itself failed while {stages[-1]}, which may be chance: "
                    f"run the command again{resume}. If that fails too, give {on_cpu}."
                ) from error
            of_host = isinstance(error, MemoryError)
            if not of_host and not devices.out_of_memory(error):
                raise
            where = "cpu" if of_host else str(devices.chosen())
            fewer = [command.spell(name) for name in _TAKE_MEMORY if name in values]
            ways = [f"Give a smaller {' or '.join(fewer) or 'model'}"]
            if not values.get("gradient_checkpointing", True):
                ways.append("gradient_checkpointing=True")
            if values.get("placement", "layers") != "layers":
                ways.append("placement=layers")
            if where != "cpu":
                ways.append(on_cpu)
            raise HeadpruneError(
                f"{where} ran out of memory while {stages[-1]}. {', or '.join(ways)}."
            ) from error
