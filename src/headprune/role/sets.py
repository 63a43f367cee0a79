"""Whether a role matters: its heads taken out at once, against as many others of the same layers.

Every head of a set gives its mean, which takes away what it says of its input. One head may do what
another does as well, so the set shows what no single head does; and any so many heads may be
missed, so random ones are the control (Wu et al. 2024, arXiv 2404.15574, section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headprune.config import RolesConfig
from headprune.evidence.losses import example_losses
from headprune.model.attention import attention_of, layer_of
from headprune.model.batch import Batch
from headprune.model.loading import task_of
from headprune.role.effects import recorded, replayed, rise, set_to
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.roles import ModuleRoles, SetEffect

DRAWS = 20

Heads = Mapping[int, Sequence[int]]
"""Places of heads, by that of their module."""


@torch.no_grad()
def set_effects(
    net: PreTrainedModel,
    attentions: Sequence[Attention],
    modules: Sequence[ModuleRoles],
    batches: Sequence[Batch],
    means: Sequence[Tensor],
    config: RolesConfig,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, SetEffect]:
    """Takes out the heads of every role together.

    Args:
        net: The model.
        attentions: The attention modules.
        modules: Their heads with their roles.
        batches: Sequences with what their loss is of.
        means: Of ``head_means``.
        config: Level and resamples of the intervals.
        progress: Called with passes done and in all.
    """
    sets = _by_role(modules)
    drawn = {name: _drawn(attentions, heads, config.seed) for name, heads in sets.items()}
    all_of = [(name, heads) for name in sets for heads in (sets[name], *drawn[name])]
    task = task_of(net)
    layers = {net.get_submodule(layer_of(a.path)): None for a in attention_of(net)}
    rises: list[list[Tensor]] = [[] for _ in all_of]
    for number, batch in enumerate(batches):
        with recorded(list(layers)) as outputs:
            whole = example_losses(net, task, batch)
        for done, (_, heads) in enumerate(all_of):
            first = net.get_submodule(layer_of(attentions[min(heads)].path))
            with ExitStack() as stack:
                stack.enter_context(replayed(outputs, first))
                for position, places in heads.items():
                    values = means[position][list(places)]
                    stack.enter_context(set_to(attentions[position], places, values))
                rises[done].append((example_losses(net, task, batch) - whole).cpu().double())
            progress(number * len(all_of) + done + 1, len(batches) * len(all_of))
    found: dict[str, list[Any]] = {name: [] for name in sets}
    for (name, _), parts in zip(all_of, rises, strict=True):
        found[name].append(torch.cat(parts).numpy())
    return {
        name: SetEffect(
            heads=sum(map(len, sets[name].values())),
            rise=rise(own, config),
            random=tuple(float(values.mean()) for values in others),
        )
        for name, (own, *others) in found.items()
    }


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
