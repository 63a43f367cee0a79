"""The surroundings of a command: progress, permissions, and its record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

Item = TypeVar("Item")
Progress = Callable[[int, int], None]
"""Called with steps done, and steps in all."""


def continued(progress: Progress, before: int, total: int) -> Progress:
    """Return the progress of a part, which ``before`` of ``total`` steps come before."""
    return lambda done, _: progress(before + done, total)


def _no_step(done: int, total: int, numbers: str = "") -> None:
    pass


@dataclass(frozen=True)
class CommandProvenance:
    """The command that wrote a result; pydantic, which reads it, is slow to import.

    Attributes:
        command: Its name.
        options: Its resolved options.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    command: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Allowed:
    """Permissions of a model.

    Attributes:
        trust_remote_code: Run code that comes with it.
        drop_unexpected: Leave out tensors of the checkpoint that its class does not take.
    """

    trust_remote_code: bool = False
    drop_unexpected: bool = False


@dataclass(frozen=True)
class Context:
    """Progress, permissions and the record of a command.

    Attributes:
        stage: Called with a few words before every stage.
        step: Called with steps of the stage done, steps in all, and numbers to show beside them.
        whole: Called with parts of the whole job done, and parts in all.
        line: Called with a line that stays, and whether it is of success or failure.
        allowed: Permissions of a model.
        provenance: The command, for the record; None where no command runs.
    """

    stage: Callable[[str], None] = lambda stage: None
    step: Callable[..., None] = _no_step
    whole: Callable[[int, int], None] = lambda done, total: None
    line: Callable[..., None] = lambda line, good=None: None
    allowed: Allowed = Allowed()
    provenance: CommandProvenance | None = None

    def each(self, items: Sequence[Item]) -> Iterator[Item]:
        """Yield the items, each a step of the stage."""
        for number, item in enumerate(items, start=1):
            yield item
            self.step(number, len(items))

    def without_progress(self) -> Context:
        """Return the same without progress."""
        return Context(allowed=self.allowed, provenance=self.provenance)
