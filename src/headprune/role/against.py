"""What a cut did to the roles of its original."""

from __future__ import annotations

from collections.abc import Sequence

from headprune.role import ROLES
from headprune.schemas.roles import ModuleRoles, RoleChange, RoleHead


def changes(original: Sequence[ModuleRoles], now: Sequence[ModuleRoles]) -> dict[str, RoleChange]:
    """By role, the heads that kept it, lost it, and took it up; heads have the original's ids."""
    found = {}
    for name in ROLES:
        before, after = _over(original, name), _over(now, name)
        found[name] = RoleChange(
            kept=tuple(head for head in before if head in after),
            lost=tuple(head for head in before if head not in after),
            moved=tuple(head for head in after if head not in before),
            is_lost=bool(before) and not after,
        )
    return found


def _over(modules: Sequence[ModuleRoles], role: str) -> list[RoleHead]:
    return [
        RoleHead(path=module.path, head=head.head)
        for module in modules
        for head in module.heads
        if head.has(role)
    ]
