"""A command: its options, and what it does with them."""

from __future__ import annotations

import inspect
import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headprune import devices, placements
from headprune.context import Allowed, Context, MadeBy
from headprune.errors import HeadpruneError
from headprune.registry import Registry

if TYPE_CHECKING:
    from rich.console import Console

from headprune.declaration.effect import refuse_idle
from headprune.declaration.options import (
    Asked,
    Door,
    Panel,
    appearance,
    build,
    flags,
)

_TAKE_MEMORY = ("batch_size", "seq_len", "calibration_tokens")


class Chapter(str, Enum):
    """A group of commands in ``headprune --help``, in its order."""

    CHOOSE = "Choose heads"
    CUT = "Make a model smaller"
    JUDGE = "Prove and measure"
    SERVE = "Serve it"


Result = TypeVar("Result")


def _as_json(result: Any) -> str:
    if isinstance(result, BaseModel):
        return result.model_dump_json(indent=2)
    return json.dumps(result.as_json(), indent=2)


@dataclass(frozen=True)
class Command(Generic[Asked, Result]):
    """A command; called, it is the function of its name in ``headprune``.

    Attributes:
        name: As at the command line.
        chapter: Where ``--help`` lists it.
        options: Its options; their docstring says what the command does.
        run: Does it.
        show: Prints the result for people.
        as_json: The result for ``--json``.
        warnings: What is likely not meant or not known, a sentence each.
        exit_code: 1 where a check failed, 2 where it cannot be decided.
        needs: Options that have an effect only beside others; see ``declaration.effect``. Not
            listed are those of the work that --dry-run only shows, and what a model may bring.
        together: Whether several processes can share the work.
        tell: Tells a CI runner of the result, or of the error that ended it, by commands that it
            is to ``say``.
        refused: Has what an earlier run wrote say that this one could not run, as its settings, of
            which some are wrong, were refused.
    """

    name: str
    chapter: Chapter
    options: type[Asked]
    run: Callable[[Asked, Context], Result]
    show: Callable[[Result, Asked, Console], None]
    as_json: Callable[[Result], str] = _as_json
    warnings: Callable[[Result], Iterable[str]] = lambda result: ()
    exit_code: Callable[[Result], int] = lambda result: 0
    needs: Mapping[str, str] = field(default_factory=dict)
    together: bool = False
    tell: Callable[[Result | HeadpruneError, Callable[[str], None]], None] = lambda result, say: (
        None
    )
    refused: Callable[[Mapping[str, Any], HeadpruneError], None] = lambda settings, why: None

    def __post_init__(self) -> None:
        # what help(), IDEs and the reference show
        object.__setattr__(self, "__doc__", self.options.__doc__)
        object.__setattr__(self, "__name__", self.section)
        object.__setattr__(self, "__signature__", self.signature())

    def __repr__(self) -> str:
        return f"headprune.{self.section}{self.signature()}"

    def __call__(self, *arguments: Any, context: Context | None = None, **settings: Any) -> Result:
        """Runs it from Python: ``arguments`` are the first options, in their order.

        Raises:
            HeadpruneError: If a setting is wrong, or the input does not fit together.
        """
        try:
            bound = self.signature().bind_partial(*arguments)
        except TypeError:
            raise HeadpruneError(
                f"{self.name}: {len(arguments)} arguments without a name were given; name them, "
                f"as in {next(reversed(self.options.model_fields))}=..."
            ) from None
        twice = next((name for name in bound.arguments if name in settings), None)
        if twice is not None:
            raise HeadpruneError(f"{self.name}: {twice} was given twice; give it once.")
        options = self.asked({**bound.arguments, **settings}, Door.ARGUMENT)
        try:
            return self.start(options, context or Context())
        except HeadpruneError as error:
            raise retold(error, self.options, Door.ARGUMENT) from error

    def start(self, options: Asked, context: Context) -> Result:
        """Runs it, with models where the options ask for, and as much of them at once.

        Raises:
            HeadpruneError: If there is no such device, or it has too little memory, or fails.
        """
        made_by, allowed = MadeBy.of(self.name, options), Allowed.by(options)
        context = replace(context, made_by=made_by, allowed=allowed)
        asked, stages = getattr(options, "device", None), ["running"]
        if asked is None:
            return self.run(options, context)

        def stage(what: str) -> None:
            stages.append(what)
            context.stage(what)

        placement = getattr(options, "placement", placements.Placement.WHOLE)
        with (
            devices.running_on(asked, context.line),
            placements.placing(placement, context.line),
            placements.sharding(getattr(options, "shard", False)),
        ):
            try:
                return self.run(options, replace(context, stage=stage))
            except Exception as error:  # what a device fails with has several kinds; others go on
                fields = type(options).model_fields
                if devices.itself_failed(error):
                    # how far the work had come says where to look if it is no chance
                    context.line("".join(traceback.format_exception(error)).rstrip())
                    resume = ", with --resume" if "resume" in fields else ""
                    raise HeadpruneError(
                        f"{devices.chosen()} itself failed while {stages[-1]}, which may be "
                        f"chance: run the command again{resume}. If that fails too, give "
                        "--device cpu."
                    ) from error
                if not devices.out_of_memory(error):
                    raise
                less = [flags(n, fields[n])[0] for n in _TAKE_MEMORY if n in fields]
                layers = "--placement layers, " if "placement" in fields else ""
                raise HeadpruneError(
                    f"{devices.chosen()} ran out of memory while {stages[-1]}. Give a smaller "
                    f"{' or '.join(less) or 'model'}, {layers}or --device cpu."
                ) from error

    def asked(self, settings: Mapping[str, Any], door: Door) -> Asked:
        """The options that settings make.

        Raises:
            HeadpruneError: If one of them is wrong, or has no effect beside the others.
        """
        try:
            options = build(self.options, settings, door)
            refuse_idle(options, self.needs, door)
            return options
        except HeadpruneError as error:
            self.refused(settings, error)
            raise

    @property
    def section(self) -> str:
        """Its name where dashes cannot be: in Python, and as a section of YAML."""
        return self.name.replace("-", "_")

    @staticmethod
    def listed() -> list[Command[Any, Any]]:
        """All commands in the order in which ``--help`` lists them."""
        chapters = list(Chapter)
        return sorted(COMMANDS.values(), key=lambda one: (chapters.index(one.chapter), one.name))

    def fields(self) -> Iterator[tuple[str, FieldInfo]]:
        """Its options: arguments, then panel by panel, its own before those that others share."""
        order = [
            name for kind in self.options.__mro__ for name in vars(kind).get("__annotations__", ())
        ]
        panels = list(Panel)
        fields = self.options.model_fields

        def rank(name: str) -> tuple[bool, int, int]:
            look = appearance(fields[name])
            return not look.positional, panels.index(look.panel), order.index(name)

        for name in sorted(fields, key=rank):
            yield name, fields[name]

    def signature(self) -> inspect.Signature:
        """Of the function: the model, data or evidence, the output, everything else by name."""
        first: list[tuple[str, FieldInfo]] = []
        others: list[tuple[str, FieldInfo]] = []
        for name, info in self.fields():
            look = appearance(info)
            needed = info.is_required() and name in ("model", "scores", "teacher")
            by_place = look.positional or needed or name in ("data", "output")
            (first if by_place else others).append((name, info))
        first.sort(key=lambda one: (one[0] != "model", one[0] == "output"))
        parameters = [
            inspect.Parameter(
                name,
                kind,
                default=inspect.Parameter.empty if info.is_required() else info.default,
            )
            for fields, kind in (
                (first, inspect.Parameter.POSITIONAL_OR_KEYWORD),
                (others, inspect.Parameter.KEYWORD_ONLY),
            )
            for name, info in fields
        ]
        return inspect.Signature(parameters)


def retold(error: HeadpruneError, options: type[BaseModel], door: Door) -> HeadpruneError:
    """The error with its settings called as they are where they came from."""
    error.args = (door.translate(str(error), options), *error.args[1:])
    return error


COMMANDS: Registry[Command[Any, Any]] = Registry("command", package="headprune.commands")


def declare(command: Command[Asked, Result]) -> Command[Asked, Result]:
    """Adds a command to all doors."""
    COMMANDS.add(command.name, command)
    return command
