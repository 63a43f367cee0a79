"""Gates on the input of the output projection. The model's code is never touched.

A head's output enters W_O as ``head_dim`` columns. Multiplying them by the head's gate ``z`` is

    sum_h z_h W_O,h x_h

the gate of Voita et al. 2019 (arXiv 1905.09418, eq. 6); with z in {0, 1} it is exactly the model
without the closed heads, and any other z folds into W_O (see ``surgery.cut``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headprune import devices
from headprune.runtime.modeling_headprune import Attention

GateSource = Callable[[int], Tensor | None]


def apply_gate(
    inputs: Float[Tensor, "batch length width"], gate: Float[Tensor, "#batch heads"]
) -> Float[Tensor, "batch length width"]:
    """Multiply every head's slice of ``inputs`` by its gate."""
    heads = inputs.view(*inputs.shape[:-1], gate.shape[-1], -1)
    return (heads * gate[:, None, :, None].to(inputs)).flatten(-2)


@contextmanager
def entering_outputs(
    attentions: Sequence[Attention], change: Callable[[int, Tensor], Tensor | None]
) -> Iterator[None]:
    """Change what enters output projections in a ``with`` block; those without heads stay.

    Args:
        attentions: The modules.
        change: Called with the position of a module in ``attentions`` and the input at every
            forward; returns the input to compute, or None for the same.
    """

    def hook(position: int, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        changed = change(position, args[0])
        return None if changed is None else (changed, *args[1:])

    with ExitStack() as stack:
        for position, attention in enumerate(attentions):
            if attention.query_heads:
                projection = attention.output_projection
                handle = projection.register_forward_pre_hook(partial(hook, position))
                stack.callback(handle.remove)
        yield


def gated(attentions: Sequence[Attention], source: GateSource) -> AbstractContextManager[None]:
    """Gate attention modules in a ``with`` block.

    Args:
        attentions: The modules.
        source: Called with the position of a module in ``attentions`` at every forward; returns
            gates of shape (1 or batch, query heads), or None to leave the module ungated.
    """

    def gate_heads(position: int, x: Tensor) -> Tensor | None:
        gate = source(position)
        return None if gate is None else apply_gate(x, gate)

    return entering_outputs(attentions, gate_heads)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Take no gradients of weights in a ``with`` block; gates have theirs."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def open_elsewhere(
    every: Sequence[Attention],
    attentions: Sequence[Attention],
    gates: Sequence[Float[Tensor, " _"]],
) -> list[Float[Tensor, " _"]]:
    """Return gates of all modules: those given for some, and open ones for the rest."""
    given = {a.path: gate for a, gate in zip(attentions, gates, strict=True)}
    return [given.get(a.path, torch.ones(a.query_heads)) for a in every]


def fixed(gates: Sequence[Float[Tensor, " _"]]) -> GateSource:
    """Return a gate source with one constant vector per attention module, on the device."""
    rows = [torch.as_tensor(gate)[None].to(devices.chosen()) for gate in gates]
    return lambda position: rows[position]
