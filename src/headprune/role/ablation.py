"""Heads taken out, and by how much the loss of every sequence rises.

A head that is taken out gives zero or its mean instead of what it computes. What runs before the
first layer that differs from the run before is not run again: ablations are run last layer first,
and those that begin alike one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.evidence.losses import example_losses
from headprune.model.attention import attention_of, layer_of
from headprune.model.batch import Batch
from headprune.model.loading import task_of
from headprune.runtime.modeling_headprune import Attention

Outputs = list[tuple[nn.Module, Any]]
"""What layers returned, in the order in which they ran."""


@dataclass(frozen=True, order=True)
class Out:
    """Heads of one module that are taken out.

    Attributes:
        module: Place of the module.
        heads: Places of the heads in it.
        by_mean: Whether they give their mean; else zero.
    """

    module: int
    heads: tuple[int, ...]
    by_mean: bool


Ablation = tuple[Out, ...]
"""At most one of every module, first module first."""


@torch.no_grad()
def rises(
    net: PreTrainedModel,
    attentions: Sequence[Attention],
    batches: Sequence[Batch],
    means: Sequence[Tensor],
    ablations: Collection[Ablation],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[Ablation, Tensor]:
    """By how much the loss of every sequence rises, by ablation; equal ones are run once.

    Args:
        net: The model.
        attentions: The attention modules whose heads are taken out.
        batches: Sequences with what their loss is of.
        means: What every head gives in the mean, by module; shape (heads, width).
        ablations: What is taken out.
        progress: Called with runs done and in all.
    """
    task = task_of(net)
    layers = list({net.get_submodule(layer_of(a.path)): None for a in attention_of(net)})
    layer_at = [net.get_submodule(layer_of(a.path)) for a in attentions]
    found: dict[Ablation, list[Tensor]] = {ablation: [] for ablation in ablations}
    done, total = 0, len(found) * len(batches)
    for batch in batches:
        with recorded(layers) as outputs:
            whole = example_losses(net, task, batch)
        order = [layer for layer, _ in outputs]
        once = len(set(order)) == len(order)  # else nothing is known of a layer's one output
        runs_at = [order.index(at) if once and at in order else 0 for at in layer_at]
        before: set[Out] = set()
        for ablation in sorted(found, key=lambda a: [(-runs_at[out.module], out) for out in a]):
            same = min((runs_at[out.module] for out in before ^ {*ablation}), default=0)
            del outputs[same:]
            with ExitStack() as stack:
                stack.enter_context(replayed(outputs))
                outputs = stack.enter_context(recorded(layers))
                for out in ablation:
                    stack.enter_context(taken(attentions[out.module], out, means[out.module]))
                loss = example_losses(net, task, batch)
            found[ablation].append((loss - whole).cpu().double())
            before, done = {*ablation}, done + 1
            progress(done, total)
    return {ablation: torch.cat(parts) for ablation, parts in found.items()}


@contextmanager
def taken(attention: Attention, out: Out, means: Tensor) -> Iterator[None]:
    """Gives W_O constants in place of what some heads give."""
    heads = list(out.heads)
    values = means[heads] if out.by_mean else torch.zeros_like(means[heads])

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        outputs = args[0].unflatten(-1, (attention.query_heads, -1)).clone()
        outputs[..., heads, :] = values.to(outputs)
        return outputs.flatten(-2), *args[1:]

    handle = attention.output_projection.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def recorded(layers: Sequence[nn.Module]) -> Iterator[Outputs]:
    """Keeps what layers return."""
    outputs: Outputs = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append((module, output))

    handles = [layer.register_forward_hook(hook) for layer in layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replayed(outputs: Outputs) -> Iterator[None]:
    """Has layers return what they returned."""
    own = [vars(layer).get("forward") for layer, _ in outputs]
    try:
        for layer, output in outputs:
            layer.forward = _constant(output)
        yield
    finally:
        for (layer, _), forward in zip(outputs, own, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


def _constant(output: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: output
