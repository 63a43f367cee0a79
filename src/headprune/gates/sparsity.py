"""Control of the open gates: an exact count, or a constant penalty.

**Target.** Minimise the loss subject to

    sum_u size_u P(z_u != 0) = t

CoFi and LLM-Shearing climb the multipliers of ``l1 (s - t) + l2 (s - t)^2`` by gradient ascent.
They lag behind the gates and overshoot, which in a few hundred steps costs more than the heads do.
Here the constraint is solved: after every optimiser step each ``log_alpha`` moves by ``-mu size``,
with the one ``mu`` that puts the expected count on the target. ``log_alpha`` stays within
``hard_concrete.BOUND``, and ``P`` counts from 0 to 1 between these bounds, so that every target can
be met.

**Penalty.** Voita et al. 2019 (eq. 8): lambda times the expected number of open heads. The count
at the end follows from lambda.
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

_EPS = 1e-6  # of a probability, in the code of Voita et al.
_PARTS, _ROUNDS = 64, 4  # of an interval at a time: the rest of it is beyond float32


class Sparsity(ABC):
    """A force that closes gates.

    Attributes:
        heads: Least number of query heads that stay.
    """

    heads: int = 0

    def penalty(self, gates: Gates) -> Tensor | float:
        """Return a term of the loss: 0 where the gates are corrected after a step."""
        return 0.0

    @abstractmethod
    def after_step(self, gates: Gates) -> None:
        """Correct the gates after an optimiser step."""

    @abstractmethod
    def choice(self, gates: Gates) -> list[int]:
        """Return the units that stay."""

    def best(self, scores: Float[Tensor, " units"], sizes: Sequence[int]) -> list[int]:
        """Return the units that stay by other scores."""
        return keep_best(scores.tolist(), sizes, self.heads)


class HeadTarget(Sparsity):
    """Exactly ``heads`` query heads stay.

    Args:
        heads: Query heads to keep; some set of units must add up to it.
        of_module: Units of every module, where each must keep one; None where one may lose all.
    """

    def __init__(self, heads: int, of_module: Sequence[int] | None = None) -> None:
        self.heads = heads
        self._of_module = of_module

    @torch.no_grad()
    def after_step(self, gates: Gates) -> None:
        """Shift all gates by the multiplier that meets the target."""
        _bound(gates, gates.log_alpha - multiplier(gates, self.heads) * _relative(gates.sizes))

    def choice(self, gates: Gates) -> list[int]:
        """Return the most open units that add up to the heads that stay."""
        return self.best(gates.log_alpha.detach(), gates.unit_sizes)

    def best(self, scores: Float[Tensor, " units"], sizes: Sequence[int]) -> list[int]:
        """Return the best units by some scores that add up to the heads that stay."""
        if self._of_module is not None:  # the best of every module before all others
            parts = scores.clone().split(list(self._of_module))
            for part in filter(len, parts):
                part[part.argmax()] += scores.max() - scores.min() + 1
            scores = torch.cat(parts)
        return super().best(scores, sizes)


class ConstantPenalty(Sparsity):
    """Voita's constant lambda.

    Args:
        strength: lambda, per expected open head.
    """

    def __init__(self, strength: float) -> None:
        self.strength = strength

    def penalty(self, gates: Gates) -> Tensor:
        """Return lambda times the expected number of open heads.

        As in the code of Voita et al. (``ConcreteGate.get_penalty``) probabilities are clamped, and
        ``log_alpha`` is not.
        """
        open_heads = gates.open_probability().clamp(_EPS, 1 - _EPS) * gates.sizes
        return self.strength * open_heads.sum()

    def after_step(self, gates: Gates) -> None:
        """Leave the gates as they are: the penalty has moved them."""

    def choice(self, gates: Gates) -> list[int]:
        """Return the units whose gate at test time is not zero."""
        return hard_concrete.value(gates.log_alpha).nonzero().flatten().tolist()


def _bound(gates: Gates, log_alpha: Tensor) -> None:
    """Set the gates, within their bounds."""
    gates.log_alpha.copy_(log_alpha.clamp(-hard_concrete.BOUND, hard_concrete.BOUND))


def _relative(sizes: Float[Tensor, " units"]) -> Float[Tensor, " units"]:
    """Return sizes over their mean: all 1 where they are equal."""
    return sizes / sizes.mean()


def multiplier(gates: Gates, target: int) -> Float[Tensor, ""]:
    """Return ``mu`` with ``sum size share(clamp(log_alpha - mu size / mean size)) = target``.

    The count falls as ``mu`` grows: an interval is narrowed, without asking the device.
    """
    log_alpha, sizes = gates.log_alpha.detach(), gates.sizes
    bound, relative = hard_concrete.BOUND, _relative(sizes)
    low, high = ((log_alpha - bound) / relative).min(), ((log_alpha + bound) / relative).max()
    parts = torch.linspace(0, 1, _PARTS + 1, device=log_alpha.device)
    for _ in range(_ROUNDS):
        places = torch.lerp(low, high, parts)
        shifted = (log_alpha - places[:, None] * relative).clamp(-bound, bound)
        above = hard_concrete.open_share(shifted, gates.temperature) @ sizes > target
        last = above.sum()[None].clamp(max=_PARTS)  # places above the target come before it
        low, high = places.take((last - 1).clamp(min=0))[0], places.take(last)[0]
    return (low + high) / 2
