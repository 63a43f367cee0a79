"""The registry of families, criteria and merges."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from headprune.errors import HeadpruneError

T = TypeVar("T")


def did_you_mean(name: str, known: list[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the nearest known name, or an empty string."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


class Registry(Mapping[str, T], Generic[T]):
    """A table of entries by name, with helpful errors.

    Args:
        kind: Kind of entry, for messages: "family", "criterion".
        error: The error to raise for an unknown name.
        listed_by: The command that lists the entries, where there are too many for a message.
    """

    def __init__(
        self,
        kind: str,
        error: type[HeadpruneError] = HeadpruneError,
        listed_by: str | None = None,
    ) -> None:
        self.kind = kind
        self._listed_by = listed_by
        self._error = error
        self._entries: dict[str, T] = {}
        self._frozen = False

    def add(self, name: str, entry: T) -> T:
        """Add an entry.

        Raises:
            ValueError: If the name is taken, or the registry is frozen.
        """
        if self._frozen:
            raise ValueError(f"the {self.kind} registry is frozen; add '{name}' in its own module")
        if name in self._entries:
            raise ValueError(f"{self.kind} '{name}' is registered twice")
        self._entries[name] = entry
        return entry

    def freeze(self) -> None:
        """Refuse further entries."""
        self._frozen = True

    def __getitem__(self, name: str) -> T:
        if name in self:
            return self._entries[name]
        known = sorted(self._entries)
        listed = f"'{self._listed_by}' lists the {len(known)} supported names"
        raise self._error(
            f"No {self.kind} named '{name}'.{did_you_mean(str(name), known)} "
            f"{listed if self._listed_by else 'Supported: ' + ', '.join(known)}."
        )

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._entries  # files hold other types

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
