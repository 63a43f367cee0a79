"""A step of a recipe: the settings of a command, with names in place of its inputs."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import (
    Field,
    create_model,
)

from headprune.config import Names, Place
from headprune.declaration import (
    Command,
    InRecipe,
    Made,
    Options,
    Slot,
    appearance,
    option,
    takes_several,
)

ORIGINAL = "original"


LOADING = ("trust_remote_code", "assume_supported", "drop_unexpected")


EVIDENCE = (Made.GATES, Made.SCORES, Made.PLAN)


class Step(Options):
    """One step; its other fields are the settings of its command.

    Attributes:
        command: Its command.
        step: The command's name.
    """

    command: ClassVar[Command[Any, Any]]

    step: str

    @classmethod
    def slots(cls) -> dict[str, Slot]:
        """The fields that name inputs."""
        looks = {name: appearance(info) for name, info in cls.model_fields.items()}
        return {name: look.slot for name, look in looks.items() if look.slot is not None}

    @classmethod
    def kind(cls) -> InRecipe[Any, Any]:
        """What its command is in a recipe."""
        assert cls.command.step is not None
        return cls.command.step

    def sources(self, slot: str) -> tuple[str, ...]:
        """The recipe's sources that a slot of data names."""
        named = getattr(self, slot)
        return (named,) if isinstance(named, str) else tuple(named or ())

    def settings(self) -> dict[str, Any]:
        """The settings that are no inputs."""
        return {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name != "step" and name not in self.slots()
        }

    def left_open(self) -> set[str]:
        """The settings that were not given and that its evidence decides."""
        return set(self.kind().from_evidence) - self.model_fields_set


@cache
def kinds() -> dict[str, type[Step]]:
    """The commands that can be steps, as classes of steps."""
    return {one.name: _kind(one) for one in Command.listed() if one.step is not None}


def _kind(command: Command[Any, Any]) -> type[Step]:
    fields: dict[str, Any] = {}
    assert command.step is not None
    for name, info in command.options.model_fields.items():
        look = appearance(info)
        if look.slot is not None:  # an input may be left out: it is what was made last
            default = command.step.defaults.get(name)
            described = option(info.description or "", default, slot=look.slot)
            kind = Names if takes_several(info) else Place
            fields[name] = (kind | None, described)
        elif look.in_recipes:
            default = ... if info.is_required() else info.default
            described = Field(default, description=info.description)
            fields[name] = (Annotated[(info.annotation, *info.metadata)], described)
    made: type[Step] = create_model(f"{command.options.__name__}Step", __base__=Step, **fields)
    made.command = command
    made.renamed, made.flattened = command.options.renamed, command.options.flattened
    return made
