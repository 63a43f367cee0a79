"""From sums to scores with intervals, and from these to labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from torch import Tensor

from headprune.config import RolesConfig
from headprune.evaluation.comparison import Interval, bootstrap
from headprune.role import ROLES, Role
from headprune.role.collection import Tallies
from headprune.role.spec import Counted
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.roles import HeadRoles, ModuleRoles, RoleScore, State


def labelled(
    attentions: Sequence[Attention],
    found: Tallies,
    controls: Tallies,
    config: RolesConfig,
    progress: Callable[[int, int], None],
) -> tuple[ModuleRoles, ...]:
    """What every head does, by what was counted of it.

    Args:
        attentions: The modules.
        found: What was counted, by module and role.
        controls: The same of controls.
        config: Level and resamples of the intervals.
        progress: Called with modules done and in all.
    """
    modules = []
    for position, attention in enumerate(attentions):
        heads = []
        for place, head in enumerate(attention.query_ids):
            scores = {}
            for name, role in ROLES.items():
                key = position, name
                if key in found:
                    score = _scored(role, found[key], controls.get(key), place, config)
                    scores.update({} if score is None else {name: score})
            heads.append(_labelled(head, scores))
        modules.append(
            ModuleRoles(
                path=attention.path,
                kind=attention.kind,
                heads=tuple(heads),
                kv_groups=_kv_groups(attention),
            )
        )
        progress(position + 1, len(attentions))
    return tuple(modules)


def _kv_groups(attention: Attention) -> tuple[tuple[int, ...], ...]:
    ids = iter(attention.query_ids)
    groups = [tuple(islice(ids, size)) for size in attention.group_sizes]
    return tuple(group for group in groups if len(group) > 1)


def _scored(
    role: Role, found: Counted, control: Counted | None, place: int, config: RolesConfig
) -> RoleScore | None:
    """The score of one head; None where there was nothing to count.

    The best of several variants is found on every other sequence, and judged on the others.
    """
    sums, counts = found[0][:, place], found[1]
    choosing = judging = slice(None)
    if len(role.variants) > 1:
        choosing, judging = slice(0, None, 2), slice(1, None, 2)
    enough = counts.sum(0) >= role.fewest
    enough &= (counts[choosing].sum(0) > 0) & (counts[judging].sum(0) > 0)
    if not bool(enough.any()):
        return None
    shares, beside = _share(sums, counts), None
    gains = sums
    if control is not None:
        # uniform attention is that of one head for all
        beside_sums = control[0][:, min(place, control[0].shape[1] - 1)]
        beside = _share(beside_sums, control[1])
        gains = sums - beside_sums if role.beyond else sums
    passing = _share(gains, counts) >= role.line
    chosen_by = _share(gains[choosing], counts[choosing])
    best = int(chosen_by.masked_fill(~enough, -1.0).argmax())
    interval = _interval(sums[judging, best], counts[judging, best], config)
    if role.beyond and control is not None:
        gained = _interval(gains[judging, best], counts[judging, best], config)
        state = _state(gained, None, role.line)
    else:
        state = _state(interval, None if beside is None else float(beside[best]), role.line)
    return RoleScore(
        score=interval.estimate,
        low=interval.low,
        high=interval.high,
        control=None if beside is None else float(beside[best]),
        state=state,
        variant=role.variants[best],
        others={
            role.variants[other]: float(shares[other])
            for other in (passing & enough).nonzero().flatten().tolist()
            if role.beyond and other != best
        },
    )


def _share(sums: Tensor, counts: Tensor) -> Tensor:
    """Per variant, the mean over all queries."""
    return sums.sum(0) / counts.sum(0).clamp(min=1)


def _interval(sums: Tensor, counts: Tensor, config: RolesConfig) -> Interval:
    summed, queries = sums.numpy(), counts.numpy()
    return bootstrap(
        lambda rows: summed[rows].sum(-1) / queries[rows].sum(-1),
        len(summed),
        config.resamples,
        config.confidence,
        config.seed,
    )


def _state(interval: Interval, control: float | None, line: float) -> State:
    if (control is not None and control >= line) or not interval.high >= line:
        return "under"
    return "over" if interval.low >= line else "nearly"


def _labelled(head: int, scores: dict[str, RoleScore]) -> HeadRoles:
    def of(state: State, attribute: bool) -> list[str]:
        return [
            name
            for name, score in scores.items()
            if score.state == state and ROLES[name].attribute == attribute
        ]

    return HeadRoles(
        head=head,
        role=max(of("over", False), key=lambda n: _factor(ROLES[n], scores[n]), default=None),
        nearly=tuple(of("nearly", False)),
        attributes=tuple(of("over", True)),
        scores=scores,
    )


def _factor(role: Role, score: RoleScore) -> float:
    """By what factor a score passes its line."""
    line = role.line + (score.control or 0) if role.beyond else role.line
    return score.score / line
