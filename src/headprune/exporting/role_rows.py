"""Roles in rows: how many heads had each, and what a cut left of them."""

from __future__ import annotations

from collections.abc import Set

from headprune.schemas.roles import RolesRecord

ROLE_COLUMNS = ("role", "heads", "kept", "moved", "largest effect", "")


def role_rows(record: RolesRecord, kept: Set[tuple[str, int]] | None = None) -> list[list[str]]:
    """Per role that heads have, or had: see ``ROLE_COLUMNS``.

    Args:
        record: What heads do: of a cut model against its original, or of the original.
        kept: Paths and ids of the heads that a cut of the original left; None for all.
    """
    rows = []
    for name in (name for name, facts in record.roles.items() if not facts.attribute):
        heads, change, moved = record.heads(name), record.changes.get(name), "-"
        stay = heads if kept is None else heads & kept
        counts = len(heads), len(stay)
        if change is not None:
            counts = len(change.kept) + len(change.lost), len(change.kept)
            moved = str(len(change.moved))
        gone = change.is_lost if change is not None else bool(heads) and not stay
        if counts[0] or moved not in "-0":
            effect = _largest_effect(record, name)
            rows.append([name, *map(str, counts), moved, effect, "lost" if gone else ""])
    return rows


def _largest_effect(record: RolesRecord, name: str) -> str:
    """By how much the loss rises without the head of a role that it needs most."""
    found = [
        head.effect.zero.nats
        for module in record.modules
        for head in module.heads
        if head.has(name) and head.effect is not None
    ]
    return f"{max(found):+.3f} nats" if found else "-"
