"""The surroundings of a command: progress, permissions, and its record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, JsonValue

Item = TypeVar("Item")


def _no_step(done: int, total: int, numbers: str = "") -> None:
    pass


class MadeBy(BaseModel):
    """The command that wrote a result.

    Attributes:
        command: Its name.
        options: Its resolved options.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: str
    options: dict[str, JsonValue]

    @classmethod
    def of(cls, command: str, options: BaseModel) -> MadeBy:
        """The record of a command in what it writes: all that has a part in the result."""
        # where it lies, and how it came to be there
        apart = {"output", "overwrite", "resume", "device", "placement"}
        resolved = options.model_dump(mode="json", exclude=apart, exclude_none=True)
        return cls(command=command, options=resolved)


@dataclass(frozen=True)
class Allowed:
    """What a model may bring.

    Attributes:
        trust_remote_code: Code that comes with it.
        drop_unexpected: Tensors of the checkpoint that its class does not take; they are left out.
    """

    trust_remote_code: bool = False
    drop_unexpected: bool = False

    @classmethod
    def by(cls, options: BaseModel) -> Allowed:
        """What options allow; a command that lacks one of them does not."""
        return cls(**{each.name: getattr(options, each.name, False) for each in fields(cls)})


@dataclass(frozen=True)
class Context:
    """What a command runs in: who is told how it goes on, and what models may bring.

    Attributes:
        stage: Called with a few words before every stage.
        step: Called with steps of the stage done, steps in all, and numbers to show beside them.
        whole: Called with parts of the whole job done, and parts in all.
        line: Called with a line that stays, and whether it tells of success or failure.
        allowed: What a model may bring.
        made_by: The command, for the record in what it writes; None where no command runs.
    """

    stage: Callable[[str], None] = lambda stage: None
    step: Callable[..., None] = _no_step
    whole: Callable[[int, int], None] = lambda done, total: None
    line: Callable[..., None] = lambda line, good=None: None
    allowed: Allowed = Allowed()
    made_by: MadeBy | None = None

    def each(self, items: Sequence[Item]) -> Iterator[Item]:
        """Items one after the other, each a step of the stage."""
        for number, item in enumerate(items, start=1):
            yield item
            self.step(number, len(items))

    def unheard(self) -> Context:
        """The same without anyone who is told."""
        return Context(allowed=self.allowed, made_by=self.made_by)
