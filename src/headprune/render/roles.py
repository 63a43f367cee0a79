"""Roles at a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from headprune.model.attention import layer_names
from headprune.render.blocks import Block, Paragraph, Signs, Table, percent
from headprune.render.terminal import show

if TYPE_CHECKING:
    from headprune.schemas.roles import HeadRoles, ModuleRoles, Rise, RoleHead, RolesRecord

NOTHING, GONE = "·", " "  # a head without role, and a removed head
_MOST = 6  # heads that a line names
_KEY = (
    "Capital letters and = are roles; small ones are attributes, or roles that the interval leaves "
    f"open; {NOTHING} is neither. +: more heads nearly have the role. score: the interval. "
    "writes: norm of the best one's output, relative to the residual."
)


def roles(console: Console, result: RolesRecord, output: Path) -> None:
    """Print heads by layer, a line per role, effects and changes."""
    signs = [(module.path, _signs(module, result)) for module in result.modules]
    page: list[Block] = [Table(("attention module", "heads"), signs, names=2, modules=True)]
    page += [_by_role(result), Paragraph(_KEY), *_effects(result), *_sets(result)]
    page += _changes(result) if result.against is not None else []
    level = 100 * result.settings.confidence
    words = f"{result.tokens:,} tokens of text; intervals at {level:g}%. Written to {output}."
    show(console, [*page, Paragraph(words)])


def _signs(module: ModuleRoles, result: RolesRecord) -> Signs:
    by_head = {head.head: head for head in module.heads}
    signs = []
    for number in range(max(by_head, default=-1) + 1):
        head = by_head.get(number)
        if head is None:
            signs.append(GONE)
        elif head.role is not None:
            signs.append(result.roles[head.role].sign)
        else:
            weaker = (*head.nearly, *head.attributes)
            signs.append(result.roles[weaker[0]].sign.lower() if weaker else NOTHING)
    return Signs("".join(signs))


def _heads(result: RolesRecord) -> list[tuple[str, HeadRoles]]:
    names = _layers(result)
    return [(f"{names[m.path]}.{head.head}", head) for m in result.modules for head in m.heads]


def _by_role(result: RolesRecord) -> Table:
    rows = []
    for role, facts in result.roles.items():
        scored = [(h.scores[role], name, h) for name, h in _heads(result) if role in h.scores]
        if not scored:
            continue
        states = [score.state for score, _, _ in scored]
        nearly = states.count("nearly")
        score, name, head = max(scored, key=lambda one: one[0].score)
        rows.append(
            (
                facts.sign,
                role,
                f"+{facts.threshold:g}" if facts.beyond else f"{facts.threshold:g}",
                f"{states.count('over')}" + (f"+{nearly}" if nearly else ""),
                f"{name}\n{score.variant}" if score.variant else name,
                f"{score.low:.2f}-{score.high:.2f}",
                "-" if score.control is None else f"{score.control:.2f}",
                "-" if head.contribution is None else percent(head.contribution),
            )
        )
    columns = ("", "role", "threshold", "heads", "best", "score", "control", "writes")
    return Table(columns, rows, names=2)


def _rise(rise: Rise) -> str:
    return f"{rise.nats:+.3f} ({rise.low:+.3f} to {rise.high:+.3f})"


def _effects(result: RolesRecord) -> list[Block]:
    measured = [(h.effect, name, h.role) for name, h in _heads(result) if h.effect is not None]
    most = sorted(measured, key=lambda one: -one[0].mean.nats)[:_MOST]
    rows = [(name, role or "", _rise(e.zero), _rise(e.mean)) for e, name, role in most]
    title = f"The {len(rows)} heads that the loss needs most, in nats per token"
    columns = ("head", "role", "set to zero", "set to its mean")
    return [Table(columns, rows, title, names=2)] if rows else []


def _sets(result: RolesRecord) -> list[Block]:
    rows = []
    for name, effect in result.sets.items():
        draws = effect.random
        random = f"{min(draws):+.3f} to {max(draws):+.3f}" if draws else "-"
        rows.append((name, str(effect.heads), _rise(effect.rise), random))
    title = "All heads of a role at once, and random ones of the same layers, in nats per token"
    columns = ("role", "heads", "set to their means", "random heads")
    return [Table(columns, rows, title)] if rows else []


def _changes(result: RolesRecord) -> list[Block]:
    rows, lines, layers = [], [], _layers(result)
    for name, change in result.changes.items():
        parts = change.kept, change.lost, change.moved
        if any(parts):
            counts = (str(len(part)) for part in parts)
            rows.append((name, *counts, "lost" if change.is_lost else ""))
        for word, heads in (("lost", change.lost), ("moved", change.moved)):
            if heads and not result.roles[name].attribute:
                lines.append(Paragraph(f"{name} {word}: {_listed(heads, layers)}"))
    return [Table(("role", "kept", "lost", "moved", ""), rows), *lines]


def _layers(result: RolesRecord) -> dict[str, str]:
    return layer_names([(module.path, module.kind) for module in result.modules])


def _listed(heads: Sequence[RoleHead], layers: dict[str, str]) -> str:
    names = [f"{layers.get(head.path, head.path)}.{head.head}" for head in heads[:_MOST]]
    more = f" and {len(heads) - _MOST} more" if len(heads) > _MOST else ""
    return ", ".join(names) + more
