"""Heads that a plan holds for a role, and roles that it loses."""

from __future__ import annotations

from collections.abc import Sequence

from headprune.config import PlanConfig
from headprune.errors import PlanError
from headprune.registry import did_you_mean
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.plan import ModelIdentity, Plan
from headprune.schemas.roles import RolesRecord, read_roles
from headprune.tensors.units import Unit, members


def asked_roles(budget: PlanConfig, model: ModelIdentity | None = None) -> RolesRecord | None:
    """Return the roles record of a plan; None without one.

    Raises:
        HeadpruneError: If it is missing or of another model, or no head has a role to keep.
    """
    if budget.roles is None:
        return None
    record = read_roles(budget.roles, model)
    for name in budget.keep_roles:
        if name not in record.roles:
            raise PlanError(
                f"--keep-roles {name}: '{budget.roles}' has no such role."
                f"{did_you_mean(name, list(record.roles))} It has {', '.join(record.roles)}."
            )
        if not record.heads(name):
            raise PlanError(
                f"--keep-roles {name}: by '{budget.roles}' no head has that role. Leave it out."
            )
    return record


def held_units(
    record: RolesRecord | None, names: Sequence[str], attentions: Sequence[Attention], unit: Unit
) -> frozenset[int]:
    """Return the positions of the units with a head that has one of some roles."""
    if record is None:
        return frozenset()
    heads = {head for name in names for head in record.heads(name)}
    units = [
        {(attention.path, attention.query_ids[position]) for position in inside}
        for attention in attentions
        for inside in members(unit, attention.group_sizes)
    ]
    return frozenset(at for at, inside in enumerate(units) if inside & heads)


def refuse_broken_hold(
    held: frozenset[int], kept: set[int], sizes: Sequence[int], names: Sequence[str]
) -> None:
    """Refuse a choice that cannot keep the held units.

    Raises:
        PlanError: Saying how many heads are held.
    """
    if not held <= kept:
        heads, room = sum(sizes[at] for at in held), sum(sizes[at] for at in kept)
        raise PlanError(
            f"--keep-roles {','.join(names)} holds {heads} of {sum(sizes)} heads, and the budgets "
            f"leave {room} that are not all of these. Keep more heads, or hold fewer roles."
        )


def roles_lost(record: RolesRecord | None, plan: Plan) -> tuple[str, ...] | None:
    """Return the roles of a record that lose their last head; None without a record."""
    if record is None:
        return None
    kept = {(path, head) for path, part in plan.attentions.items() for head in part.keep}
    owners = {n: record.heads(n) for n, facts in record.roles.items() if not facts.attribute}
    return tuple(name for name, heads in owners.items() if heads and not heads & kept)
