"""Control of the open gates: an exact count, or a constant penalty.

**Target.** Minimise the loss subject to

    sum_u size_u P(z_u != 0) = t

CoFi and LLM-Shearing climb the multipliers of ``l1 (s - t) + l2 (s - t)^2`` by gradient ascent.
They lag behind the gates and overshoot, which in a few hundred steps costs more than the heads do.
Here the constraint is solved: after every optimiser step all ``log_alpha`` move by the one ``-mu``
that puts the expected count on the target. ``log_alpha`` stays within ``hard_concrete.BOUND``, and
``P`` counts from 0 to 1 between these bounds, so that every target can be met. The target falls
linearly during a warm-up.

**Penalty.** Voita et al. 2019 (eq. 8): lambda times the expected number of open heads, here per
attention module. The count at the end follows from lambda.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from headprune.gates.gates import Gates
from headprune.tensors import hard_concrete
from headprune.tensors.selection import keep_best

_PARTS, _ROUNDS = 64, 4  # of an interval at a time: the rest of it is beyond float32


class Sparsity(ABC):
    """A force that closes gates.

    Attributes:
        heads: Least number of query heads that stay.
    """

    heads: int = 0

    @abstractmethod
    def penalty(self, gates: Gates) -> Tensor | float:
        """Return a term of the loss."""

    @abstractmethod
    def after_step(self, gates: Gates, done: float) -> None:
        """Correct the gates after an optimiser step; ``done`` is the fraction of the choosing."""

    @abstractmethod
    def choice(self, gates: Gates) -> list[int]:
        """Return the units that stay."""

    def target(self, done: float) -> float | None:
        """Return the target of the expected number of open heads, if there is one."""
        return None


class HeadTarget(Sparsity):
    """Exactly ``heads`` query heads stay.

    Args:
        heads: Query heads to keep; some set of units must add up to it.
        sizes: Query heads per unit.
        warmup: Fraction of the choosing until the target has fallen to this number.
    """

    def __init__(self, heads: int, sizes: Sequence[int], warmup: float) -> None:
        self.heads = heads
        self.warmup = warmup
        self._total = sum(sizes)

    def penalty(self, gates: Gates) -> float:
        """Return 0: the multiplier acts after the step."""
        return 0.0

    def target(self, done: float) -> float:
        """Return the target of open heads: linear from all to the final count over the warm-up."""
        share = min(1.0, done / self.warmup) if self.warmup else 1.0
        return self._total - (self._total - self.heads) * share

    @torch.no_grad()
    def after_step(self, gates: Gates, done: float) -> None:
        """Shift all gates by the multiplier that meets the target."""
        _bound(gates, gates.log_alpha - multiplier(gates, self.target(done)))

    def choice(self, gates: Gates) -> list[int]:
        """Return the most open units that add up to the heads that stay."""
        return keep_best(gates.log_alpha.tolist(), gates.unit_sizes, self.heads)


class ConstantPenalty(Sparsity):
    """Voita's constant lambda.

    Args:
        strength: lambda, per expected open head and attention module.
        modules: Number of attention modules.
    """

    def __init__(self, strength: float, modules: int) -> None:
        self.strength = strength
        self.modules = modules

    def penalty(self, gates: Gates) -> Tensor:
        """Return lambda times the mean over modules of the expected number of open heads."""
        return self.strength * (gates.open_probability() * gates.sizes).sum() / self.modules

    @torch.no_grad()
    def after_step(self, gates: Gates, done: float) -> None:
        """Hold the gates in their bounds."""
        _bound(gates, gates.log_alpha)

    def choice(self, gates: Gates) -> list[int]:
        """Return the units whose gate at test time is not zero."""
        return gates.values().nonzero().flatten().tolist()


def _bound(gates: Gates, log_alpha: Tensor) -> None:
    """Set the gates, within their bounds."""
    gates.log_alpha.copy_(log_alpha.clamp(-hard_concrete.BOUND, hard_concrete.BOUND))


def multiplier(gates: Gates, target: float) -> Float[Tensor, ""]:
    """Return ``mu`` with ``sum size share(clamp(log_alpha - mu)) = target``.

    The count falls as ``mu`` grows: an interval is narrowed, without asking the device.
    """
    log_alpha, sizes = gates.log_alpha.detach(), gates.sizes
    bound = hard_concrete.BOUND
    low, high = log_alpha.min() - bound, log_alpha.max() + bound
    parts = torch.linspace(0, 1, _PARTS + 1, device=log_alpha.device)
    for _ in range(_ROUNDS):
        places = torch.lerp(low, high, parts)
        shifted = (log_alpha - places[:, None]).clamp(-bound, bound)
        above = hard_concrete.open_share(shifted, gates.temperature) @ sizes > target
        last = above.sum()[None].clamp(max=_PARTS)  # places above the target come before it
        low, high = places.take((last - 1).clamp(min=0))[0], places.take(last)[0]
    return (low + high) / 2
