"""Forms of a head whose gate closes: gone, with others in its place, or with a window.

A gate z between the two ends makes the output of a head ``z open + (1 - z) closed``. Where W_O will
be refitted once heads are gone, others stand in for a head: their outputs x predict part of it.
With zero mean, correlations C and independent noise of variance (1 - z) / z on each head that is
the linear estimate

    M x = C (C + (1 - z) / z)^-1 x = (1 - (1 - z) (C z + 1 - z)^-1) x

the same as W_O M, the ridge regression of the outputs of W_O on the open heads. At z = 1 for every
head M is the identity; the columns of a head with z = 0 are zero. So gates are trained for the
model that will be written (``surgery.refit``), and not for one that nothing makes up for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from headprune.evidence.statistics import Statistics
from headprune.evidence.windows import windowed_outputs
from headprune.model.gating import GateSource, entering_outputs
from headprune.model.windows import AttentionCall, attending
from headprune.runtime.modeling_headprune import Attention

_RIDGE = 1e-3  # of the variance of a channel: smaller parts predict nothing


@dataclass(frozen=True)
class Correlation:
    """Moments of the input of an output projection, over tokens of a text.

    Attributes:
        mean: Its mean, where W_O has a bias to hold that, else 0; shape (width,).
        scale: Root mean square about the mean, shape (width,).
        matrix: Correlations, shape (width, width).
    """

    mean: Float[Tensor, " width"]
    scale: Float[Tensor, " width"]
    matrix: Float[Tensor, "width width"]

    @classmethod
    def of(cls, statistics: Statistics, attention: Attention, device: torch.device) -> Correlation:
        """Return those of a module on a device; of ``statistics``, "gram" and "activations"."""
        inputs = statistics.activations
        gram = statistics.gram.double() / inputs.tokens
        mean = (inputs.sums / inputs.tokens).flatten().double()
        if getattr(attention.output_projection, "bias", None) is None:
            mean = torch.zeros_like(mean)
        scale = gram.diagonal().clamp(min=torch.finfo(torch.float32).tiny).sqrt()
        matrix = gram / scale / scale[:, None]
        return cls(*(part.float().to(device) for part in (mean, scale, matrix)))

    def predict(
        self, gate: Float[Tensor, " heads"], x: Float[Tensor, "batch length width"]
    ) -> Float[Tensor, "batch length width"]:
        """Return the prediction of all heads from the gated ones, in the dtype of ``x``."""
        z = gate.repeat_interleave(len(self.scale) // len(gate))
        noisy = self.matrix * z + torch.diag(1 - z + _RIDGE * z)
        # solve itself would ask the device whether it is singular, which the ridge excludes
        lost, _ = torch.linalg.solve_ex(noisy, torch.diag(1 - z), left=False)
        matrix = (torch.eye(len(z), device=z.device) - lost) * self.scale[:, None] / self.scale
        return F.linear(x - self.mean.to(x), matrix.to(x)) + self.mean.to(x)


def predicted(
    attentions: Sequence[Attention],
    source: GateSource,
    correlations: Sequence[Correlation | None],
) -> AbstractContextManager[None]:
    """Gate heads in a ``with`` block, and have open heads make up for closed ones.

    Args:
        attentions: The modules.
        source: As of ``model.gating.gated``, of shape (1, query heads).
        correlations: Moments of every module; None for one that never runs.
    """

    def predict(position: int, x: Tensor) -> Tensor | None:
        gate, others = source(position), correlations[position]
        return None if gate is None or others is None else others.predict(gate[0], x)

    return entering_outputs(attentions, predict)


def narrowed(
    attentions: Sequence[Attention], source: GateSource, window: tuple[int, int]
) -> AbstractContextManager[None]:
    """Leave heads with a closed gate a window in a ``with`` block.

    Args:
        attentions: The modules.
        source: As of ``model.gating.gated``.
        window: Size and sinks.

    Raises:
        PlanError: If a module cannot have a window.
    """
    position_of: dict[Any, int] = {each.module: at for at, each in enumerate(attentions)}

    def attend(call: AttentionCall) -> Tensor:
        gate, outputs = source(position_of[call.module]), call.outputs(call.mask)
        if gate is None or outputs.shape[1] <= sum(window):
            return outputs
        whole, rest = outputs.split([sum(window), outputs.shape[1] - sum(window)], 1)
        near = windowed_outputs(call, window)
        return torch.cat([whole, torch.lerp(near, rest, gate[:, None, :, None].to(rest))], 1)

    return attending(attentions, attend)
