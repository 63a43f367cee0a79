"""Effects of heads: the rise of the loss with heads set to zero or to their means.

Sets of a role are compared with random heads of the same layers (Wu et al. 2024, arXiv
2404.15574, section 4).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.config import RolesConfig
from headprune.context import Progress
from headprune.evidence.losses import example_losses
from headprune.evidence.statistics import collect
from headprune.model.attention import attention_of, family_of, layer_of
from headprune.model.batch import Batch
from headprune.model.gating import entering_outputs
from headprune.model.loading import task_of
from headprune.role.scores import resampled
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.roles import HeadEffect, ModuleRoles, Rise, SetEffect

DRAWS = 20

Outputs = list[tuple[nn.Module, Any]]
"""What layers returned, in the order in which they ran."""


@dataclass(frozen=True, order=True)
class Out:
    """Heads of a module, by position, set to their mean or zero."""

    module: int
    heads: tuple[int, ...]
    by_mean: bool


Ablation = tuple[Out, ...]
"""At most one of every module, first module first."""


def effects(
    net: PreTrainedModel,
    attentions: Sequence[Attention],
    modules: Sequence[ModuleRoles],
    batches: Sequence[Batch],
    config: RolesConfig,
    progress: Progress = lambda done, total: None,
) -> tuple[tuple[ModuleRoles, ...], dict[str, SetEffect]]:
    """Return modules with an effect per head, and the effects of sets by role."""
    sets = {
        name: [_to_means(one) for one in (heads, *random_sets(attentions, heads, config.seed))]
        for name, heads in _by_role(modules).items()
    }
    alone = [
        (Out(position, (head,), by_mean),)
        for position, attention in enumerate(attentions)
        for head in range(attention.query_heads)
        for by_mean in (False, True)
    ]
    ablations = [*alone, *(one for draws in sets.values() for one in draws)]
    means = head_means(net, attentions, batches)
    by_ablation = rises(net, attentions, batches, means, ablations, progress)

    def rise(ablation: Ablation) -> Rise:
        values: Any = by_ablation[ablation].numpy()
        interval = resampled(lambda rows: values[rows].mean(-1), len(values), config)
        return Rise(nats=interval.estimate, low=interval.low, high=interval.high)

    pairs = iter(alone)
    with_effects = []
    for module in modules:
        heads = [
            head.model_copy(
                update={"effect": HeadEffect(zero=rise(next(pairs)), mean=rise(next(pairs)))}
            )
            for head in module.heads
        ]
        with_effects.append(module.model_copy(update={"heads": tuple(heads)}))
    return tuple(with_effects), {
        name: SetEffect(
            heads=sum(len(out.heads) for out in of_role),
            rise=rise(of_role),
            random=tuple(float(by_ablation[one].mean()) for one in drawn),
        )
        for name, (of_role, *drawn) in sets.items()
    }


@torch.no_grad()
def head_means(
    net: PreTrainedModel, attentions: Sequence[Attention], batches: Sequence[Batch]
) -> list[Tensor]:
    """Return the mean of every head's output, by module; shape (heads, width)."""
    evidence = collect(net, attentions, batches, frozenset({"activations"}))
    return [e.activations.sums / max(e.activations.tokens, 1) for e in evidence if e.activations]


def _by_role(modules: Sequence[ModuleRoles]) -> dict[str, dict[int, list[int]]]:
    sets: dict[str, dict[int, list[int]]] = {}
    for position, module in enumerate(modules):
        for place, head in enumerate(module.heads):
            if head.role is not None:
                sets.setdefault(head.role, {}).setdefault(position, []).append(place)
    return sets


def _to_means(heads: Mapping[int, Sequence[int]]) -> Ablation:
    return tuple(Out(module, tuple(sorted(heads[module])), True) for module in sorted(heads))


def random_sets(
    attentions: Sequence[Attention], heads: Mapping[int, Sequence[int]], seed: int
) -> list[Mapping[int, Sequence[int]]]:
    """Draw heads of the same layers, as many in each; those of the set where others run out."""
    generator = np.random.default_rng(seed)
    free = {p: sorted({*range(attentions[p].query_heads)} - {*heads[p]}) for p in heads}
    if not any(free.values()):
        return []

    def draw(position: int) -> list[int]:
        count = len(heads[position])
        drawn = generator.permutation(free[position])[:count].tolist()
        again = generator.permutation(list(heads[position]))[: count - len(drawn)].tolist()
        return [int(place) for place in (*drawn, *again)]

    return [{position: draw(position) for position in heads} for _ in range(DRAWS)]


@torch.no_grad()
def rises(
    net: PreTrainedModel,
    attentions: Sequence[Attention],
    batches: Sequence[Batch],
    means: Sequence[Tensor],
    ablations: Collection[Ablation],
    progress: Progress = lambda done, total: None,
) -> dict[Ablation, Tensor]:
    """Return the rise of each sequence's loss, by ablation.

    ``means`` hold the mean output of every head, by module; shape (heads, width).
    Layers before the first difference from the run before are replayed: equal starts come in a row.
    """
    task = task_of(net)
    layers = list({net.get_submodule(layer_of(a.path)): None for a in attention_of(net)})
    layer_at = [net.get_submodule(layer_of(a.path)) for a in attentions]
    losses: dict[Ablation, list[Tensor]] = {ablation: [] for ablation in ablations}
    done, total = 0, len(losses) * len(batches)
    for batch in batches:
        with recorded(layers) as outputs:
            whole = example_losses(net, task, batch)
        order = [layer for layer, _ in outputs]
        # else a layer has no one output, or later layers read more of it than its output
        once = len(set(order)) == len(order) and not family_of(net.config).keeps_kv
        runs_at = [order.index(at) if once and at in order else 0 for at in layer_at]
        before: set[Out] = set()
        for ablation in sorted(losses, key=lambda a: [(-runs_at[out.module], out) for out in a]):
            same = min((runs_at[out.module] for out in before ^ {*ablation}), default=0)
            del outputs[same:]
            with ExitStack() as stack:
                stack.enter_context(replayed(outputs))
                outputs = stack.enter_context(recorded(layers))
                for out in ablation:
                    stack.enter_context(_taken(attentions[out.module], out, means[out.module]))
                loss = example_losses(net, task, batch)
            losses[ablation].append((loss - whole).cpu().double())
            before, done = {*ablation}, done + 1
            progress(done, total)
    return {ablation: torch.cat(parts) for ablation, parts in losses.items()}


def _taken(attention: Attention, out: Out, means: Tensor) -> AbstractContextManager[None]:
    heads = list(out.heads)
    values = means[heads] if out.by_mean else torch.zeros_like(means[heads])

    def take(position: int, x: Tensor) -> Tensor:
        outputs: Tensor = x.unflatten(-1, (attention.query_heads, -1)).clone()
        outputs[..., heads, :] = values.to(outputs)
        return outputs.flatten(-2)

    return entering_outputs([attention], take)


@contextmanager
def recorded(layers: Sequence[nn.Module]) -> Iterator[Outputs]:
    """Record the outputs of layers."""
    outputs: Outputs = []
    with ExitStack() as stack:
        for layer in layers:
            handle = layer.register_forward_hook(lambda m, _, output: outputs.append((m, output)))
            stack.callback(handle.remove)
        yield outputs


@contextmanager
def replayed(outputs: Outputs) -> Iterator[None]:
    """Have layers return recorded outputs."""
    with ExitStack() as stack:
        for layer, output in outputs:
            stack.callback(_restore, layer, vars(layer).get("forward"))
            layer.forward = lambda *args, _output=output, **kwargs: _output
        yield


def _restore(layer: nn.Module, forward: Any) -> None:
    del layer.forward
    if forward is not None:  # hooks of offloading lie there
        layer.forward = forward
