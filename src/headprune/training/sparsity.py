"""How many gates are open: a Lagrangian towards an exact count, or a constant penalty.

**Target.** Minimise the loss subject to

    sum_u size_u P(z_u != 0) = t

CoFi and LLM-Shearing climb the multipliers of ``l1 (s - t) + l2 (s - t)^2`` by gradient ascent. The
multipliers lag behind the gates and overshoot, which with a few hundred steps costs more than the
heads do. The constraint is one equation in one multiplier, so it is solved instead: after every
optimiser step all ``log_alpha`` move by the same ``-mu``, the one that puts the expected count on
the target. The target itself falls linearly from all heads to ``t`` during the warm-up.

**Penalty.** Voita et al. 2019 (eq. 8): lambda times the expected number of open heads, here per
attention module. Where it ends is for lambda to say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from headprune.tensors import hard_concrete
from headprune.tensors.selection import keep_best
from headprune.training.gates import Gates


class Sparsity(ABC):
    """What closes gates."""

    @abstractmethod
    def penalty(self, gates: Gates) -> Tensor | float:
        """Added to the loss of a step."""

    @abstractmethod
    def after_step(self, gates: Gates, progress: float) -> None:
        """Corrects the gates after an optimiser step; ``progress`` is the share of steps done."""

    @abstractmethod
    def choice(self, gates: Gates) -> list[int]:
        """The units that stay, when the gates are to be chosen."""

    def target(self, gates: Gates, progress: float) -> float | None:
        """The expected number of open heads asked for at this point, if there is one."""
        return None


class HeadTarget(Sparsity):
    """Exactly ``heads`` query heads stay.

    Args:
        heads: Query heads to keep; some set of units must add up to it.
        warmup: Share of the steps in which the target falls to ``heads``.
    """

    def __init__(self, heads: int, warmup: float) -> None:
        self.heads = heads
        self.warmup = warmup

    def penalty(self, gates: Gates) -> float:
        """The multiplier acts after the step, so nothing is added to the loss."""
        return 0.0

    def target(self, gates: Gates, progress: float) -> float:
        """Linear from all heads to ``heads`` during the warm-up."""
        total = float(gates.sizes.sum())
        share = min(1.0, progress / self.warmup) if self.warmup else 1.0
        return total - (total - self.heads) * share

    @torch.no_grad()
    def after_step(self, gates: Gates, progress: float) -> None:
        """Shifts all gates by the multiplier that meets the target."""
        gates.log_alpha.sub_(multiplier(gates, self.target(gates, progress)))

    def choice(self, gates: Gates) -> list[int]:
        """The most open units that add up to ``heads``."""
        sizes = [int(size) for size in gates.sizes]
        return keep_best(gates.log_alpha.tolist(), sizes, self.heads)


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
        """Lambda times the mean over modules of the expected number of open heads."""
        return self.strength * gates.expected_heads() / self.modules

    def after_step(self, gates: Gates, progress: float) -> None:
        """Nothing: the gradient does it all."""

    def choice(self, gates: Gates) -> list[int]:
        """The units whose gate at test time is not zero."""
        return [i for i, z in enumerate(hard_concrete.value(gates.log_alpha).tolist()) if z > 0]


# where P(z != 0) is 0 or 1 in float32, so that targets of 0 and of all heads are met as well
_REACH = 60.0


def multiplier(gates: Gates, target: float) -> float:
    """The shift ``mu`` with ``sum size P(log_alpha - mu) = target``, by bisection."""
    log_alpha, sizes = gates.log_alpha.detach().cpu().double(), gates.sizes.cpu()
    low = float(log_alpha.min()) - _REACH
    high = float(log_alpha.max()) + _REACH
    for _ in range(64):
        middle = (low + high) / 2
        open_ = hard_concrete.open_probability(log_alpha - middle, gates.temperature)
        low, high = (middle, high) if float((open_ * sizes).sum()) > target else (low, middle)
    return (low + high) / 2
