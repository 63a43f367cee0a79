"""What the loss says of a head: how much it rises without it.

A head's output is set to zero, which is what a cut does, or to its mean over the text, which leaves
later layers the distribution that they know and takes away only what the head says of its input.

    loss(head set to zero or to its mean) - loss

What runs before the head's layer is the same every time and is not run again: both measures
together take about one and a half forward passes per head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.config import RolesConfig
from headprune.evaluation.comparison import bootstrap
from headprune.evidence.collection import collect
from headprune.evidence.losses import example_losses
from headprune.model.attention import attention_of, layer_of
from headprune.model.batch import Batch
from headprune.model.loading import task_of
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.roles import HeadEffect, ModuleRoles, Rise

Layers = list[tuple[nn.Module, Any]]


@torch.no_grad()
def effects(
    net: PreTrainedModel,
    attentions: Sequence[Attention],
    batches: Sequence[Batch],
    means: Sequence[Tensor],
    config: RolesConfig,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[tuple[int, int], HeadEffect]:
    """Takes out every head for itself.

    Args:
        net: The model.
        attentions: The attention modules whose heads are taken out.
        batches: Sequences with what their loss is of.
        means: Of ``head_means``.
        config: Level and resamples of the intervals.
        progress: Called with heads done and in all.

    Returns:
        By module and place of the head in it.
    """
    task = task_of(net)
    heads = [(i, head) for i, a in enumerate(attentions) for head in range(a.query_heads)]
    layers = {net.get_submodule(layer_of(a.path)): None for a in attention_of(net)}
    rises: dict[tuple[int, int], list[Tensor]] = {key: [] for key in heads}
    for number, batch in enumerate(batches):
        with recorded(list(layers)) as outputs:
            whole = example_losses(net, task, batch)
        for done, (position, head) in enumerate(heads):
            attention = attentions[position]
            layer = net.get_submodule(layer_of(attention.path))
            pair = []
            for value in (torch.zeros_like(means[position][head]), means[position][head]):
                with replayed(outputs, layer), set_to(attention, [head], value[None]):
                    pair.append(example_losses(net, task, batch) - whole)
            rises[position, head].append(torch.stack(pair, 1).cpu().double())
            progress(number * len(heads) + done + 1, len(batches) * len(heads))
    return {key: _effect(torch.cat(found), config) for key, found in rises.items()}


@torch.no_grad()
def head_means(
    net: PreTrainedModel, attentions: Sequence[Attention], batches: Sequence[Batch]
) -> list[Tensor]:
    """The mean of every head's output, by module; shape (heads, width)."""
    found = collect(net, attentions, batches, frozenset({"activations"}))
    seen = [evidence.activations for evidence in found]
    return [s.sums / max(s.tokens, 1) for s in seen if s is not None]


def with_effects(
    modules: Sequence[ModuleRoles], found: Mapping[tuple[int, int], HeadEffect]
) -> tuple[ModuleRoles, ...]:
    """The same with the effect of every head."""
    return tuple(
        module.model_copy(
            update={
                "heads": tuple(
                    head.model_copy(update={"effect": found[position, place]})
                    for place, head in enumerate(module.heads)
                )
            }
        )
        for position, module in enumerate(modules)
    )


def _effect(rises: Tensor, config: RolesConfig) -> HeadEffect:
    """From the rise of every sequence, by zero and by mean."""
    zero, mean = rises.T.numpy()
    return HeadEffect(zero=rise(zero, config), mean=rise(mean, config))


def rise(values: Any, config: RolesConfig) -> Rise:
    """The mean rise over sequences, with its interval."""
    found = bootstrap(
        lambda rows: values[rows].mean(-1),
        len(values),
        config.resamples,
        config.confidence,
        config.seed,
    )
    return Rise(nats=found.estimate, low=found.low, high=found.high)


@contextmanager
def set_to(attention: Attention, heads: Sequence[int], values: Tensor) -> Iterator[None]:
    """Gives W_O constants in place of what some heads give, shape (heads, width)."""
    places = list(heads)

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        outputs = args[0].unflatten(-1, (attention.query_heads, -1)).clone()
        outputs[..., places, :] = values.to(outputs)
        return outputs.flatten(-2), *args[1:]

    handle = attention.output_projection.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def recorded(layers: Sequence[nn.Module]) -> Iterator[Layers]:
    """Keeps what layers return, in the order in which they run."""
    outputs: Layers = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append((module, output))

    handles = [layer.register_forward_hook(hook) for layer in layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replayed(outputs: Layers, until: nn.Module) -> Iterator[None]:
    """Has the layers before one return what they returned; none, where a layer runs twice."""
    order = [module for module, _ in outputs]
    once = len(set(order)) == len(order)
    before = outputs[: order.index(until)] if once and until in order else []
    own = [vars(module).get("forward") for module, _ in before]
    try:
        for module, output in before:
            module.forward = _constant(output)
        yield
    finally:
        for (module, _), forward in zip(before, own, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward


def _constant(output: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: output
