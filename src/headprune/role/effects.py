"""What the loss says of heads: how much it rises without them.

A head's output is set to zero, which is what a cut does, or to its mean over the text, which leaves
later layers the distribution that they know and takes away only what the head says of its input.

    loss(head set to zero or to its mean) - loss

Then all heads of a role give their means, beside as many random others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headprune.config import RolesConfig
from headprune.evaluation.comparison import bootstrap
from headprune.evidence.statistics import collect
from headprune.model.batch import Batch
from headprune.role.ablation import Ablation, Out, rises
from headprune.role.sets import sets_of
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.roles import HeadEffect, ModuleRoles, Rise, SetEffect


def effects(
    net: PreTrainedModel,
    attentions: Sequence[Attention],
    modules: Sequence[ModuleRoles],
    batches: Sequence[Batch],
    config: RolesConfig,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[tuple[ModuleRoles, ...], dict[str, SetEffect]]:
    """Takes out every head for itself, and the heads of every role together.

    Args:
        net: The model.
        attentions: The attention modules.
        modules: Their heads with their roles.
        batches: Sequences with what their loss is of.
        config: Level and resamples of the intervals.
        progress: Called with runs done and in all.

    Returns:
        The modules with the effect of every head, and what is said of every role.
    """
    sets = sets_of(attentions, modules, config.seed)
    alone = [_alone(i, head) for i, a in enumerate(attentions) for head in range(a.query_heads)]
    asked = [
        *(one for pair in alone for one in pair),
        *(s for drawn in sets.values() for s in drawn),
    ]
    means = head_means(net, attentions, batches)
    found = rises(net, attentions, batches, means, asked, progress)
    with_effects = tuple(
        module.model_copy(
            update={
                "heads": tuple(
                    head.model_copy(update={"effect": _effect(found, position, place, config)})
                    for place, head in enumerate(module.heads)
                )
            }
        )
        for position, module in enumerate(modules)
    )
    return with_effects, {
        name: SetEffect(
            heads=sum(len(out.heads) for out in own),
            rise=_rise(found[own], config),
            random=tuple(float(found[one].mean()) for one in others),
        )
        for name, (own, *others) in sets.items()
    }


@torch.no_grad()
def head_means(
    net: PreTrainedModel, attentions: Sequence[Attention], batches: Sequence[Batch]
) -> list[Tensor]:
    """The mean of every head's output, by module; shape (heads, width)."""
    found = collect(net, attentions, batches, frozenset({"activations"}))
    seen = [evidence.activations for evidence in found]
    return [s.sums / max(s.tokens, 1) for s in seen if s is not None]


def _alone(module: int, head: int) -> tuple[Ablation, Ablation]:
    """A head set to zero, and to its mean."""
    zero, mean = (Out(module, (head,), by_mean) for by_mean in (False, True))
    return (zero,), (mean,)


def _effect(
    found: dict[Ablation, Tensor], module: int, head: int, config: RolesConfig
) -> HeadEffect:
    zero, mean = (_rise(found[one], config) for one in _alone(module, head))
    return HeadEffect(zero=zero, mean=mean)


def _rise(found: Tensor, config: RolesConfig) -> Rise:
    """The mean rise over sequences, with its interval."""
    values: Any = found.numpy()
    interval = bootstrap(
        lambda rows: values[rows].mean(-1),
        len(values),
        config.resamples,
        config.confidence,
        config.seed,
    )
    return Rise(nats=interval.estimate, low=interval.low, high=interval.high)
