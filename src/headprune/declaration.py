"""What a command is: its options, said once, and what it does with them.

From one declaration come the command line, the settings of ``--config``, the step of a recipe, the
function in ``headprune`` and the page of the reference.
"""

from __future__ import annotations

import inspect
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from headprune.errors import HeadpruneError
from headprune.io.parsing import shown
from headprune.registry import Registry, did_you_mean

if TYPE_CHECKING:
    from rich.console import Console

    from headprune.estimates import Estimate, Sizes


class Chapter(str, Enum):
    """A group of commands in ``headprune --help``, in its order."""

    CHOOSE = "Choose heads"
    CUT = "Make a model smaller"
    JUDGE = "Prove and measure"
    JOBS = "Whole jobs"


class Panel(str, Enum):
    """A group of options in ``--help``, in its order."""

    MAIN = "Options"
    INPUT = "Input"
    CUT = "What to cut"
    CALIBRATION = "Calibration"
    TRAINING = "Training"
    OUTPUT = "Output"
    ADVANCED = "Advanced"


class Made(str, Enum):
    """What the output of a step of a recipe is to the steps after it."""

    MODEL = "model"
    GATES = "gates"
    SCORES = "scores"
    PLAN = "plan"
    REPORT = "report"


class Slot(str, Enum):
    """What an option names in a recipe, where it names an input."""

    MODEL = "model"  # a step that makes a model, or the original
    GATES = "gates"  # a step that trains gates, or a folder of them
    SCORES = "scores"  # a step that scores heads, or a folder of scores
    PLAN = "plan"  # a step that makes a plan, or a file
    FILE = "file"  # a file
    DATA = "data"  # one of the recipe's sources


@dataclass(frozen=True)
class Appearance:
    """How an option appears at the command line.

    Attributes:
        panel: Its group in ``--help``.
        flags: How it is spelt, where that is not its name with dashes.
        metavar: What stands for its value.
        positional: Whether it is an argument.
        as_text: Whether the option itself reads its value from text, as 1,8 or 24GiB.
        in_recipes: Whether a step of a recipe has it as a setting.
        slot: What it names in a recipe, if it names an input.
        note: A remark on how a value was understood, which names the option as "{}".
    """

    panel: Panel = Panel.ADVANCED
    flags: str | None = None
    metavar: str | None = None
    positional: bool = False
    as_text: bool = False
    in_recipes: bool = True
    slot: Slot | None = None
    note: Callable[[Any], str | None] = lambda value: None


def option(
    description: str, default: Any = ..., panel: Panel = Panel.ADVANCED, **appearance: Any
) -> Any:
    """Declares an option; ``appearance`` are further attributes of ``Appearance``."""
    info = Field(default, description=description)
    info.metadata.append(Appearance(panel, **appearance))
    return info


class Options(BaseModel):
    """Settings of a command, or a part of them that several commands share.

    Attributes:
        renamed: Names that settings had before, with those that they have.
        flattened: Sections that settings were in before.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    renamed: ClassVar[Mapping[str, str]] = {}
    flattened: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _with_present_names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for section in cls.flattened:
            if isinstance(values.get(section), dict):
                values = {**values[section], **values}
                del values[section]
        return {cls.renamed.get(name, name): value for name, value in values.items()}

    @classmethod
    def near(cls, name: str) -> str:
        """Which setting may be meant by a name, as a question."""
        said = did_you_mean(name, [*cls.model_fields, *cls.renamed])
        old = next((old for old in cls.renamed if f"'{old}'" in said), None)
        return said if old is None else f" Did you mean '{cls.renamed[old]}'?"

    def part(self, kind: type[Asked], **others: Any) -> Asked:
        """The settings that belong to a stage of the command.

        Args:
            kind: The settings of the stage.
            **others: Values of those that are not settings of the command.
        """
        mine = {name: getattr(self, name) for name in kind.model_fields if hasattr(self, name)}
        return kind(**{**mine, **others})


Asked = TypeVar("Asked", bound=Options)
Result = TypeVar("Result")
Say = Callable[[str], None]


def appearance(info: FieldInfo) -> Appearance:
    """How an option appears; see ``option``."""
    return next((m for m in info.metadata if isinstance(m, Appearance)), Appearance())


def flags(name: str, info: FieldInfo) -> tuple[str, ...]:
    """How an option is spelt: ``--text-column``, or ``--speed`` and ``--no-speed``."""
    given, plain = appearance(info).flags, name.replace("_", "-")
    if given is not None:
        return tuple(given.split("/"))
    if info.annotation is bool and info.default is True:
        return f"--{plain}", f"--no-{plain}"
    return (f"--{plain}",)


class Door(Enum):
    """Where settings come from, which decides how a sentence names them."""

    OPTION = "option"  # --text-column
    KEY = "key"  # text_column, in YAML
    ARGUMENT = "argument"  # text_column, in Python

    def spell(self, setting: str, options: type[BaseModel]) -> str:
        """A setting as it is called there."""
        info = options.model_fields.get(setting)
        if self is not Door.OPTION or info is None:
            return setting
        if appearance(info).positional:
            return appearance(info).metavar or setting.upper()
        return flags(setting, info)[0]

    def translate(self, message: str, options: type[BaseModel]) -> str:
        """A message, which names settings as at the command line, for who came by this door."""
        if self is Door.OPTION:
            return message
        known = {
            flag: name for name, info in options.model_fields.items() for flag in flags(name, info)
        }
        return re.sub(r"--[a-z][a-z0-9-]*", lambda found: known.get(found[0], found[0]), message)


def build(options: type[Asked], values: Mapping[str, Any], door: Door = Door.OPTION) -> Asked:
    """Validates values.

    Raises:
        HeadpruneError: Naming the first setting that is unknown or out of range.
    """
    try:
        return options.model_validate(dict(values))
    except ValidationError as error:
        raise HeadpruneError(_sentence(error, options, door)) from None


def _sentence(error: ValidationError, options: type[Options], door: Door) -> str:
    found = error.errors()  # what was given and is wrong comes before what was not given
    first = next((each for each in found if each["type"] != "missing"), found[0])
    name = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        return f"There is no setting '{name}'.{options.near(name)}"
    called = door.spell(name, options)
    if first["type"] == "missing":
        by_file = f": give it, or '{name}' in the file of --config" if door is Door.OPTION else ""
        return f"{called} is missing{by_file}."
    message = door.translate(first["msg"].removeprefix("Value error, "), options)
    if not name:  # of several settings; all that was given would say nothing more
        return f"These settings: {message}."
    return f"{called}: {message} (got {shown(first['input'])})."


def warn_of_old_names(options: type[Options], given: Iterable[str], door: Door) -> None:
    """Warns of settings that are called otherwise today."""
    for name in given:
        if name in options.renamed:
            old = f"--{name.replace('_', '-')}" if door is Door.OPTION else name
            new = door.spell(options.renamed[name], options)
            warnings.warn(f"{old} is called {new} now.", FutureWarning, stacklevel=3)


def _no_step(done: int, total: int, numbers: str = "") -> None:
    pass


@dataclass(frozen=True)
class Context:
    """What a command runs in: who is told how it goes on, and who answers.

    Attributes:
        stage: Called with a few words before every stage.
        step: Called with steps of the stage done, steps in all, and numbers to show beside them.
        line: Called with a line that stays, and whether it tells of success or failure.
        ask: Asks a question, with a default answer if there is one; None where nobody answers.
        confirm: Shows lines and asks whether to go on; None where nobody answers.
    """

    stage: Callable[[str], None] = lambda stage: None
    step: Callable[..., None] = _no_step
    line: Callable[..., None] = lambda line, good=None: None
    ask: Callable[[str, str | None], str] | None = None
    confirm: Callable[[Iterable[str], str], bool] | None = None


@dataclass(frozen=True)
class InRecipe(Generic[Asked, Result]):
    """What a command is in a recipe.

    Attributes:
        makes: What its output is to later steps.
        summary: Its result in a line.
        estimate: What it would take.
        outputs: The options that name what it writes, each with a file of the step's folder; ""
            is the folder itself.
        defaults: Values of settings that a recipe may leave out, where the command needs them.
        about_all: The option that takes the recipe's output, of a step that is about all before it.
        by_evidence: Whether it needs one of its inputs that are evidence; by default the last made.
        resumes: Whether it can go on from where it was interrupted.
        refuse: Raises where a step asks for what there is not; called as a recipe is read.
    """

    makes: Made
    summary: Callable[[Result], str]
    estimate: Callable[[Asked, Sizes], Estimate]
    outputs: Mapping[str, str] = field(default_factory=lambda: {"output": ""})
    defaults: Mapping[str, Any] = field(default_factory=dict)
    about_all: str | None = None
    by_evidence: bool = False
    resumes: bool = False
    refuse: Callable[[Asked], None] = lambda options: None

    @property
    def file(self) -> str:
        """The file of its output that later steps read; "" for the folder."""
        return next(iter(self.outputs.values()))


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
        passed: Whether no limit was found broken; if not, the command ends with exit code 1.
        step: What it is in a recipe, if it can be a step.
        together: Whether several processes can share the work.
        tell: Tells a CI runner of the result, or of the error that ended it, by commands that it
            is to ``say``.
    """

    name: str
    chapter: Chapter
    options: type[Asked]
    run: Callable[[Asked, Context], Result]
    show: Callable[[Result, Asked, Console], None]
    as_json: Callable[[Result], str] = _as_json
    warnings: Callable[[Result], Iterable[str]] = lambda result: ()
    passed: Callable[[Result], bool] = lambda result: True
    step: InRecipe[Asked, Result] | None = None
    together: bool = False
    tell: Callable[[Result | HeadpruneError, Callable[[str], None]], None] = lambda result, say: (
        None
    )

    def __post_init__(self) -> None:
        # what help(), IDEs and the reference show
        object.__setattr__(self, "__doc__", self.options.__doc__)
        object.__setattr__(self, "__name__", self.section)
        object.__setattr__(self, "__signature__", self.signature())

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
        warn_of_old_names(self.options, settings, Door.ARGUMENT)
        options = build(self.options, {**bound.arguments, **settings}, Door.ARGUMENT)
        try:
            return self.run(options, context or Context())
        except HeadpruneError as error:
            raise retold(error, self.options, Door.ARGUMENT) from error

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
            by_place = look.positional or name in ("data", "output")
            needed = info.is_required() and look.slot is not None
            (first if by_place or needed else others).append((name, info))
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
