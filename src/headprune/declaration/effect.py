"""Options that have an effect only beside others.

A command names them in its ``needs``: an option, and the conditions under which it does something.
Conditions joined by ``" & "`` must all hold, alternatives joined by ``" | "`` at least once:

    needle        this option is set
    method=l0     it has this value; of a list, one that begins so
    !steps        it does not hold
"""

from __future__ import annotations

from collections.abc import Mapping

from headprune.declaration.options import Door, Options
from headprune.errors import HeadpruneError


def refuse_idle(options: Options, needs: Mapping[str, str], door: Door) -> None:
    """Refuse options that were given and have no effect in this call.

    Raises:
        HeadpruneError: Naming them, and what would give them an effect.
    """
    unmet: dict[str, list[str]] = {}
    for name, conditions in needs.items():
        if _given(options, name):
            for condition in conditions.split(" & "):
                if not any(_holds(options, one) for one in condition.split(" | ")):
                    unmet.setdefault(condition, []).append(door.spell(name, type(options)))
    for condition, idle in unmet.items():
        names, them = " and ".join(sorted(idle)), "them" if idle[1:] else "it"
        have = "have" if idle[1:] else "has"
        needed = " or ".join(_spelt(options, one, door) for one in condition.split(" | "))
        if condition.startswith("!"):
            raise HeadpruneError(
                f"{names} {have} no effect with {needed}: leave out one or the other."
            )
        raise HeadpruneError(
            f"{names} {have} no effect without {needed}: give that too, or leave {them} out."
        )


def _given(options: Options, name: str) -> bool:
    """Whether a call sets an option, to more than the nothing that it defaults to."""
    nothing = (
        getattr(options, name) in (None, False, ()) and not type(options).model_fields[name].default
    )
    return name in options.model_fields_set and not nothing


def _holds(options: Options, condition: str) -> bool:
    name, _, wanted = condition.removeprefix("!").partition("=")
    value = getattr(options, name)
    if not wanted:
        holds = value is not None and value is not False and value != ()
    elif isinstance(value, tuple):
        holds = any(str(one).startswith(wanted) for one in value)
    else:
        holds = str(getattr(value, "value", value)) == wanted
    return holds != condition.startswith("!")


def _spelt(options: Options, condition: str, door: Door) -> str:
    name, _, wanted = condition.removeprefix("!").partition("=")
    called = door.spell(name, type(options))
    return called + (f"{' ' if door is Door.OPTION else '='}{wanted}" if wanted else "")
