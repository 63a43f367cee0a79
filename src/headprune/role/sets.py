"""Whether a role matters: its heads taken out at once, against as many others of the same layers.

Every head of a set gives its mean, which takes away what it says of its input. One head may do what
another does as well, so the set shows what no single head does; and any so many heads may be
missed, so random ones are the control (Wu et al. 2024, arXiv 2404.15574, section 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from headprune.role.ablation import Ablation, Out
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.roles import ModuleRoles

DRAWS = 20

Heads = Mapping[int, Sequence[int]]
"""Places of heads, by that of their module."""


def sets_of(
    attentions: Sequence[Attention], modules: Sequence[ModuleRoles], seed: int
) -> dict[str, list[Ablation]]:
    """Of every role that heads have: its heads, then the random draws.

    Args:
        attentions: The attention modules.
        modules: Their heads with their roles.
        seed: Seed of the draws.
    """
    return {
        name: [_ablation(one) for one in (heads, *_drawn(attentions, heads, seed))]
        for name, heads in _by_role(modules).items()
    }


def _ablation(heads: Heads) -> Ablation:
    return tuple(Out(module, tuple(sorted(heads[module])), True) for module in sorted(heads))


def _by_role(modules: Sequence[ModuleRoles]) -> dict[str, dict[int, list[int]]]:
    sets: dict[str, dict[int, list[int]]] = {}
    for position, module in enumerate(modules):
        for place, head in enumerate(module.heads):
            if head.role is not None:
                sets.setdefault(head.role, {}).setdefault(position, []).append(place)
    return sets


def _drawn(attentions: Sequence[Attention], heads: Heads, seed: int) -> list[Heads]:
    """Random heads of the same layers, as many in each; the set's own only where others run out."""
    generator = np.random.default_rng(seed)
    others = {
        position: sorted(set(range(attentions[position].query_heads)) - set(places))
        for position, places in heads.items()
    }
    if not any(others.values()):
        return []

    def one(position: int, places: Sequence[int]) -> list[int]:
        free = generator.permutation(others[position])[: len(places)].tolist()
        own = generator.permutation(list(places))[: len(places) - len(free)].tolist()
        return [int(place) for place in (*free, *own)]

    return [{p: one(p, places) for p, places in heads.items()} for _ in range(DRAWS)]
