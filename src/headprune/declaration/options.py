"""Options of a command: each said once, with all that the doors need to know."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from headprune.errors import HeadpruneError
from headprune.io.parsing import shown
from headprune.registry import did_you_mean


class Panel(str, Enum):
    """A group of options in ``--help``, in its order."""

    MAIN = "Options"
    INPUT = "Input"
    CUT = "What to cut"
    CALIBRATION = "Calibration"
    TRAINING = "Training"
    OUTPUT = "Output"
    ADVANCED = "Advanced"


@dataclass(frozen=True)
class Appearance:
    """How an option appears at the command line.

    Attributes:
        panel: Its group in ``--help``.
        flags: How it is spelt, where that is not its name with dashes.
        metavar: What stands for its value.
        positional: Whether it is an argument.
        as_text: Whether the option itself reads its value from text, as 1,8 or 24GiB.
        note: A remark on how a value was understood, which names the option as "{}".
    """

    panel: Panel = Panel.ADVANCED
    flags: str | None = None
    metavar: str | None = None
    positional: bool = False
    as_text: bool = False
    note: Callable[[Any], str | None] = lambda value: None


def option(
    description: str, default: Any = ..., panel: Panel = Panel.ADVANCED, **appearance: Any
) -> Any:
    """Declares an option; ``appearance`` are further attributes of ``Appearance``."""
    info = Field(default, description=description)
    info.metadata.append(Appearance(panel, **appearance))
    return info


class Options(BaseModel):
    """Settings of a command, or a part of them that several commands share."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @classmethod
    def near(cls, name: str) -> str:
        """Which setting may be meant by a name, as a question."""
        by_flag = {
            flag.strip("-").replace("-", "_"): field
            for field, info in cls.model_fields.items()
            for flag in flags(field, info)
        }
        if name in by_flag:
            return f" It is called '{by_flag[name]}' there."
        return did_you_mean(name, [*cls.model_fields])

    def part(self, kind: type[Asked], **others: Any) -> Asked:
        """The settings that belong to a stage of the command.

        Args:
            kind: The settings of the stage.
            **others: Values of those that are not settings of the command.
        """
        mine = {name: getattr(self, name) for name in kind.model_fields if hasattr(self, name)}
        return kind(**{**mine, **others})


Asked = TypeVar("Asked", bound=Options)


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
