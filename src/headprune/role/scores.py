"""From sums to scores with intervals, and from these to roles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from headprune.config import RolesConfig
from headprune.context import Progress
from headprune.evaluation.comparison import Interval, bootstrap
from headprune.role.attended import Counted
from headprune.role.table import ROLES, Role
from headprune.role.watch import Tallies
from headprune.role.writing import Contributions
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.roles import (
    HeadRoles,
    ModuleRoles,
    RoleChange,
    RoleHead,
    RoleScore,
    State,
)


def scored(
    attentions: Sequence[Attention],
    sums: Tallies,
    controls: Tallies,
    config: RolesConfig,
    contributions: Contributions | None = None,
    progress: Progress = lambda done, total: None,
) -> tuple[ModuleRoles, ...]:
    """Return scores and roles of every head from sums and their controls."""
    modules = []
    for position, attention in enumerate(attentions):
        heads = []
        norms = contributions.of(position) if contributions else [None] * attention.query_heads
        for place, head in enumerate(attention.query_ids):
            scores = {
                name: score
                for name, role in ROLES.items()
                if (key := (position, name)) in sums
                and (score := score_of(role, sums[key], controls.get(key), place, config))
            }
            heads.append(_head(head, scores, norms[place]))
        ids = iter(attention.query_ids)
        groups = [tuple(islice(ids, size)) for size in attention.group_sizes]
        modules.append(
            ModuleRoles(
                path=attention.path,
                kind=attention.kind,
                heads=tuple(heads),
                kv_groups=tuple(group for group in groups if len(group) > 1),
            )
        )
        progress(position + 1, len(attentions))
    return tuple(modules)


def score_of(
    role: Role, counted: Counted, control: Counted | None, place: int, config: RolesConfig
) -> RoleScore | None:
    """Return the score of one head; None without enough queries.

    The best variant is chosen on every second sequence and judged on the others.
    """
    sums, counts = counted[0][:, place], counted[1]
    choosing = judging = slice(None)
    if len(role.variants) > 1:
        choosing, judging = slice(0, None, 2), slice(1, None, 2)
    enough = counts.sum(0) >= role.fewest
    enough &= (counts[choosing].sum(0) > 0) & (counts[judging].sum(0) > 0)
    if not bool(enough.any()):
        return None
    control_shares, gains = None, sums
    if control is not None:
        # uniform attention is that of one head for all
        control_sums = control[0][:, min(place, control[0].shape[1] - 1)]
        control_shares = _share(control_sums, control[1])
        gains = sums - control_sums if role.beyond else sums
    chosen_by = _share(gains[choosing], counts[choosing])
    best = int(chosen_by.masked_fill(~enough, -1.0).argmax())
    control_share = None if control_shares is None else float(control_shares[best])
    interval = _interval(sums[judging, best], counts[judging, best], config)
    if role.beyond:
        gain = _interval(gains[judging, best], counts[judging, best], config)
        state = _state(gain, None, role.threshold)
    else:
        state = _state(interval, control_share, role.threshold)
    passing = (_share(gains, counts) >= role.threshold) & enough if role.beyond else enough & False
    return RoleScore(
        score=interval.estimate,
        low=interval.low,
        high=interval.high,
        control=control_share,
        state=state,
        variant=role.variants[best],
        others={
            role.variants[variant]: float(_share(sums, counts)[variant])
            for variant in passing.nonzero().flatten().tolist()
            if variant != best
        },
    )


def _share(sums: Tensor, counts: Tensor) -> Tensor:
    return sums.sum(0) / counts.sum(0).clamp(min=1)


def _interval(sums: Tensor, counts: Tensor, config: RolesConfig) -> Interval:
    summed, queries = sums.numpy(), counts.numpy()
    return resampled(lambda rows: summed[rows].sum(-1) / queries[rows].sum(-1), len(summed), config)


def resampled(statistic: Callable[[Any], Any], n: int, config: RolesConfig) -> Interval:
    """Return the interval of a statistic of sequences."""
    return bootstrap(statistic, n, config.resamples, config.confidence, config.seed)


def _state(interval: Interval, control: float | None, threshold: float) -> State:
    if (control is not None and control >= threshold) or not interval.high >= threshold:
        return "under"
    return "over" if interval.low >= threshold else "nearly"


def _head(head: int, scores: dict[str, RoleScore], contribution: float | None) -> HeadRoles:
    def names(state: State, attribute: bool) -> list[str]:
        return [
            name
            for name, score in scores.items()
            if score.state == state and ROLES[name].attribute == attribute
        ]

    def factor(name: str) -> float:
        role, score = ROLES[name], scores[name]
        return score.score / (role.threshold + (score.control or 0) * role.beyond)

    return HeadRoles(
        head=head,
        role=max(names("over", False), key=factor, default=None),
        nearly=tuple(names("nearly", False)),
        attributes=tuple(names("over", True)),
        scores=scores,
        contribution=contribution,
    )


def changes(original: Sequence[ModuleRoles], now: Sequence[ModuleRoles]) -> dict[str, RoleChange]:
    """Return by role the heads that kept, lost and gained it."""

    def over(modules: Sequence[ModuleRoles], role: str) -> list[RoleHead]:
        return [
            RoleHead(path=module.path, head=head.head)
            for module in modules
            for head in module.heads
            if head.has(role)
        ]

    by_role = {}
    for name in ROLES:
        before, after = over(original, name), over(now, name)
        by_role[name] = RoleChange(
            kept=tuple(head for head in before if head in after),
            lost=tuple(head for head in before if head not in after),
            moved=tuple(head for head in after if head not in before),
            is_lost=bool(before) and not after,
        )
    return by_role
