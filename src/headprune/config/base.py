"""Settings of the library: frozen, validated, written beside every result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from headprune.errors import HeadpruneError
from headprune.io.parsing import shown
from headprune.registry import did_you_mean

Kind = TypeVar("Kind", bound="Settings")


class Settings(BaseModel):
    """Settings of a stage of the work."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    def part(self, kind: type[Kind], **values: Any) -> Kind:
        """Return settings of another stage, with the fields that both have."""
        shared = {n: getattr(self, n) for n in kind.model_fields if n in type(self).model_fields}
        return kind(**{**shared, **values})


def build(kind: type[Kind], call: Mapping[str, Any] | None = None, /, **values: Any) -> Kind:
    """Validate settings.

    Args:
        kind: Their class.
        call: Values of a command, such as its ``locals()``; the fields of the class are taken.
        values: Others, which win.

    Raises:
        HeadpruneError: Naming the first unknown or invalid setting.
    """
    shared = {name: value for name, value in (call or {}).items() if name in kind.model_fields}
    try:
        return kind.model_validate(shared | values)
    except ValidationError as error:
        raise HeadpruneError(sentence(error, list(kind.model_fields))) from None


def sentence(error: ValidationError, known: Sequence[str] = (), called: str = "") -> str:
    """Say in a sentence which setting is wrong, and why."""
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        return f"There is no setting '{name}'.{did_you_mean(name, list(known))}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return f"{flag(name)} is missing."
    got = f" (got {shown(first['input'])})" if called or name else ""
    return f"{called or (flag(name) if name else 'These settings')}: {message}{got}."


_SPELT = {"targets": "--for", "limits": "--limit", "metrics": "--metric"}
_SPELT |= {"heal_steps": "--heal", "context_tokens": "--context"}


def flag(name: str) -> str:
    """Spell a setting as at the command line."""
    if name in ("model", "output", "folder", "runs"):
        return name.upper()
    return _SPELT.get(name, f"--{name.replace('_', '-')}")
