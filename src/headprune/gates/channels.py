"""One trained factor per channel of what enters W_O: gates finer than heads, with weights frozen.

Scaling activations by learned vectors is (IA)^3 (Liu et al. 2022, arXiv 2205.05638, section 3.3).
On the input of W_O a factor scales a column, so that in the end the factors are part of W_O and
cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headprune.gates.gates import Gates
from headprune.model.heads import read_output, write_output
from headprune.runtime.modeling_headprune import Attention, input_dim


class Channels(nn.Module):
    """The factors of all attention modules, 1 to begin with.

    Attributes:
        factors: Per attention module with heads, shape (query heads x head_dim,), float32.
    """

    def __init__(self, attentions: Sequence[Attention]) -> None:
        super().__init__()
        self._attentions = [a for a in attentions if a.query_heads]
        projections = [a.output_projection for a in self._attentions]
        widths = [p.get_parameter("weight").shape[input_dim(p)] for p in projections]
        self.factors = nn.ParameterList(torch.ones(width) for width in widths)

    @contextmanager
    def scaling(self, gates: Gates) -> Iterator[None]:
        """Scales what enters every output projection for the time of a ``with`` block.

        Where the gates are disabled the factors are as well, and while gates are sampled they rest:
        they would learn to make up for the noise.
        """
        handles = []
        for attention, factor in zip(self._attentions, self.factors, strict=True):
            hook = _hook(factor, gates)
            handles.append(attention.output_projection.register_forward_pre_hook(hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def fold(self) -> list[nn.Parameter]:
        """Makes the factors part of W_O; returns the weights that changed."""
        changed = []
        for attention, factor in zip(self._attentions, self.factors, strict=True):
            heads, _ = read_output(attention)
            scaled = heads * factor.to(heads).unflatten(0, (len(heads), 1, -1))
            write_output(attention, scaled, None)
            changed.append(attention.output_projection.get_parameter("weight"))
        return changed


def _hook(
    factor: nn.Parameter, gates: Gates
) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...] | None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if gates.disabled:
            return None
        scale = factor.detach() if gates.drawn else factor
        return args[0] * scale.to(args[0]), *args[1:]

    return hook
