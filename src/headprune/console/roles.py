"""Roles as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from headprune.console.tables import module_table, narrow, table
from headprune.model.attention import layer_names

if TYPE_CHECKING:
    from headprune.schemas.roles import HeadRoles, ModuleRoles, RoleHead, RoleScore, RolesRecord

NOTHING, GONE = "·", " "  # a head without role, and one that was cut
_MOST = 6  # heads that a line names


def roles(console: Console, result: RolesRecord, output: Path) -> None:
    """Every layer's heads, a line per role, and what became of the original's."""
    rows = {module.path: [_signs(module, result)] for module in result.modules}
    module_table(console, ("heads",), rows, numbers_from=2)
    _by_role(console, result)
    _effects(console, result)
    _sets(console, result)
    if result.against is not None:
        _changes(console, result)
    console.print(
        f"{result.tokens:,} tokens of text; intervals at {100 * result.settings.confidence:g}%. "
        f"Written to {escape(str(output))}."
    )


def _signs(module: ModuleRoles, result: RolesRecord) -> Text:
    """A letter per head; small and grey where a role is nearly there, or only an attribute."""
    by_head = {head.head: head for head in module.heads}
    picture = Text()
    for number in range(max(by_head, default=-1) + 1):
        head = by_head.get(number)
        if head is None:
            picture.append(GONE)
        elif head.role is not None:
            picture.append(result.roles[head.role].sign, "green")
        else:
            found = (*head.nearly, *head.attributes)
            sign = result.roles[found[0]].sign.lower() if found else NOTHING
            picture.append(sign, "bright_black")
    return picture


def _by_role(console: Console, result: RolesRecord) -> None:
    names = _layers(result)
    columns = ("line", "heads", "best", "score", "control", "writes")
    grid = narrow(table("", "role", *columns, numbers_from=2))
    for name, facts in result.roles.items():
        scored = [
            (score, f"{names[module.path]}.{head.head}", head)
            for module in result.modules
            for head in module.heads
            if (score := head.scores.get(name)) is not None
        ]
        if scored:
            states = [score.state for score, _, _ in scored]
            nearly = states.count("nearly")
            grid.add_row(
                escape(facts.sign),
                name,
                f"+{facts.line:g}" if facts.beyond else f"{facts.line:g}",
                f"{states.count('over')}" + (f"+{nearly}" if nearly else ""),
                *_best(*max(scored, key=lambda one: one[0].score)),
            )
    console.print(grid)
    console.print(
        "[bright_black]capital letters and = are roles; small ones are roles that the interval "
        f"leaves open, or attributes; {NOTHING} is neither; +: as many more are nearly over the "
        "line; score: the interval; writes: norm of what the best one writes, of that of the "
        "residual[/]"
    )


def _layers(result: RolesRecord) -> dict[str, str]:
    """What layers are called, by path."""
    return layer_names([(module.path, module.kind) for module in result.modules])


def _best(score: RoleScore, name: str, head: HeadRoles) -> tuple[str, ...]:
    variant = f"\n{score.variant}" if score.variant else ""
    return (
        escape(f"{name}{variant}"),
        f"{score.low:.2f}-{score.high:.2f}",
        "-" if score.control is None else f"{score.control:.2f}",
        "-" if head.contribution is None else f"{head.contribution:.1%}",
    )


def _effects(console: Console, result: RolesRecord) -> None:
    """The heads without which the loss rises most."""
    names = _layers(result)
    found = [
        (head.effect, f"{names[module.path]}.{head.head}", head.role)
        for module in result.modules
        for head in module.heads
        if head.effect is not None
    ]
    if not found:
        return
    grid = table("head", "role", "set to zero", "set to its mean", numbers_from=2)
    for effect, name, role in sorted(found, key=lambda one: -one[0].mean.nats)[:_MOST]:
        cells = (
            f"{r.nats:+.3f} ({r.low:+.3f} to {r.high:+.3f})" for r in (effect.zero, effect.mean)
        )
        grid.add_row(escape(name), role or "", *cells)
    console.print(
        f"The {min(_MOST, len(found))} heads that the loss needs most, in nats per token:"
    )
    console.print(grid)


def _sets(console: Console, result: RolesRecord) -> None:
    """Roles whose heads were taken out at once, beside as many random ones."""
    if not result.sets:
        return
    grid = table("role", "heads", "set to their means", "random heads", numbers_from=1)
    for name, found in result.sets.items():
        rise, others = found.rise, found.random
        grid.add_row(
            name,
            str(found.heads),
            f"{rise.nats:+.3f} ({rise.low:+.3f} to {rise.high:+.3f})",
            f"{min(others):+.3f} to {max(others):+.3f}" if others else "-",
        )
    console.print(
        "All heads of a role at once, and as many random ones of the same layers, in nats per "
        "token:"
    )
    console.print(grid)


def _changes(console: Console, result: RolesRecord) -> None:
    grid = table("role", "kept", "lost", "moved", "")
    for name, change in result.changes.items():
        if change.kept or change.lost or change.moved:
            counts = (len(part) for part in (change.kept, change.lost, change.moved))
            grid.add_row(name, *map(str, counts), "lost" if change.is_lost else "")
    console.print(grid)
    for name, change in result.changes.items():
        for what, heads in (("lost", change.lost), ("moved", change.moved)):
            if heads and not result.roles[name].attribute:
                console.print(f"{name} {what}: {_listed(heads, _layers(result))}")


def _listed(heads: Sequence[RoleHead], layers: Mapping[str, str]) -> str:
    names = [f"{layers.get(head.path, head.path)}.{head.head}" for head in heads[:_MOST]]
    more = f" and {len(heads) - _MOST} more" if len(heads) > _MOST else ""
    return escape(", ".join(names) + more)
