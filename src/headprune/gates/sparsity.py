"""How many gates are open: an exact count, met in one of two ways, or a constant penalty.

**Target.** Minimise the loss subject to

    sum_u size_u P(z_u != 0) = t

CoFi and LLM-Shearing climb the multipliers of ``l1 (s - t) + l2 (s - t)^2`` by gradient ascent. The
multipliers lag behind the gates and overshoot, which with a few hundred steps costs more than the
heads do. The constraint is one equation in one multiplier, so it is solved instead: after every
optimiser step all ``log_alpha`` move by the same ``-mu``, the one that puts the expected count on
the target. ``log_alpha`` is held in the bounds of ``hard_concrete.BOUND``, and ``P`` counts from 0
to 1 between them, so that every target can be met. The target itself falls linearly to that of the
round during the round's warm-up.

**Gradual pruning.** The same count without sampling: see ``gates.saliency``.

**Penalty.** Voita et al. 2019 (eq. 8): lambda times the expected number of open heads, here per
attention module. Where it ends is for lambda to say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from headprune.gates.gates import Gates
from headprune.gates.rounds import Round
from headprune.tensors import hard_concrete
from headprune.tensors.selection import attainable, keep_best


class Sparsity(ABC):
    """What closes gates.

    Attributes:
        heads: Query heads that stay at least.
    """

    heads: int = 0

    @abstractmethod
    def penalty(self, gates: Gates) -> Tensor | float:
        """Added to the loss of a step."""

    @abstractmethod
    def after_step(self, gates: Gates, now: Round, step: int) -> None:
        """Corrects the gates after an optimiser step that is not the last of a round's choosing."""

    @abstractmethod
    def choice(self, gates: Gates, now: Round) -> list[int]:
        """The units that stay, when the heads of a round are chosen."""

    def target(self, gates: Gates, now: Round, step: int) -> float | None:
        """The expected number of open heads asked for after a step, if there is one."""
        return None


class HeadTarget(Sparsity):
    """Exactly ``heads`` query heads stay.

    Args:
        heads: Query heads to keep; some set of units must add up to it.
        sizes: Query heads per unit.
        warmup: Share of a round's choosing in which the target falls to that of the round.
    """

    def __init__(self, heads: int, sizes: Sequence[int], warmup: float) -> None:
        self.heads = heads
        self.warmup = warmup
        self._total = sum(sizes)
        self._attainable = sorted(attainable(sizes))

    def penalty(self, gates: Gates) -> float:
        """The multiplier acts after the step, so nothing is added to the loss."""
        return 0.0

    def after_round(self, part: float) -> int:
        """Heads left once ``part`` of what is to go is gone: the nearest count that units reach."""
        wanted = self._total - (self._total - self.heads) * part
        counts = [count for count in self._attainable if count >= self.heads]
        return min(counts, key=lambda count: (abs(count - wanted), count))

    def target(self, gates: Gates, now: Round, step: int) -> float:
        """Linear from the heads that are left to those of the round, during its warm-up."""
        left = float((gates.kept * gates.sizes).sum())
        return left if gates.chosen else self._falling(left, now, step)

    def _falling(self, start: float, now: Round, step: int) -> float:
        share = min(1.0, now.share_chosen(step) / self.warmup) if self.warmup else 1.0
        return start - (start - self.after_round(now.part)) * share

    @torch.no_grad()
    def after_step(self, gates: Gates, now: Round, step: int) -> None:
        """Shifts all gates by the multiplier that meets the target."""
        shift = multiplier(gates, self.target(gates, now, step))
        _bound(gates, gates.log_alpha - shift)

    def choice(self, gates: Gates, now: Round) -> list[int]:
        """The most open units, of those left, that add up to the round's heads."""
        left = gates.kept.nonzero().flatten().tolist()
        scores = gates.log_alpha.detach()[gates.kept].tolist()
        sizes = [gates.unit_sizes[unit] for unit in left]
        return [left[i] for i in keep_best(scores, sizes, self.after_round(now.part))]


class GradualPruning(HeadTarget):
    """Exactly ``heads`` query heads stay; at every step those go that cost least to close.

    No more go in a step than the target falls by, so that the factors of those that are left can
    make up for them before the next ones are chosen.
    """

    def target(self, gates: Gates, now: Round, step: int) -> float:
        """Linear from all heads to those that are to stay."""
        return float(self.heads) if gates.chosen else self._falling(float(self._total), now, step)

    def after_step(self, gates: Gates, now: Round, step: int) -> None:
        """Closes gates until no more heads are open than the target of this step."""
        gates.take_saliency()
        self._close(gates, self.target(gates, now, step))

    def choice(self, gates: Gates, now: Round) -> list[int]:
        """What is open once all are closed that have to be."""
        self._close(gates, float(self.heads))
        kept: list[int] = gates.kept.nonzero().flatten().tolist()
        return kept

    def _close(self, gates: Gates, target: float) -> None:
        left = gates.kept.nonzero().flatten().tolist()
        costs = gates.saliency.cost(gates.values())[left].tolist()
        sizes = [gates.unit_sizes[unit] for unit in left]
        # of units of unequal size only those go without which the exact count can still be met
        unequal = len(set(sizes)) > 1
        stay = {left[i] for i in keep_best(costs, sizes, self.heads)} if unequal else set[int]()
        count, closed = sum(sizes), list[int]()
        for _, unit, size in sorted(zip(costs, left, sizes, strict=True)):
            if unit not in stay and count - size >= target:
                closed.append(unit)
                count -= size
        gates.close(closed)


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
        return self.strength * (gates.open_probability() * gates.sizes).sum() / self.modules

    @torch.no_grad()
    def after_step(self, gates: Gates, now: Round, step: int) -> None:
        """Holds the gates in their bounds."""
        _bound(gates, gates.log_alpha)

    def choice(self, gates: Gates, now: Round) -> list[int]:
        """The units whose gate at test time is not zero."""
        return gates.values().nonzero().flatten().tolist()


def _bound(gates: Gates, log_alpha: Tensor) -> None:
    """Sets the gates of the heads that are left, within their bounds."""
    bounded = log_alpha.clamp(-hard_concrete.BOUND, hard_concrete.BOUND)
    gates.log_alpha.copy_(torch.where(gates.kept, bounded, gates.log_alpha))


def multiplier(gates: Gates, target: float) -> float:
    """Return ``mu`` with ``sum size share(clamp(log_alpha - mu)) = target``, by bisection."""
    kept = gates.kept.cpu()
    log_alpha, sizes = gates.log_alpha.detach().cpu().double()[kept], gates.sizes.cpu()[kept]
    bound = hard_concrete.BOUND
    low, high = float(log_alpha.min()) - bound, float(log_alpha.max()) + bound
    for _ in range(64):
        middle = (low + high) / 2
        shifted = (log_alpha - middle).clamp(-bound, bound)
        open_ = hard_concrete.open_share(shifted, gates.temperature)
        low, high = (middle, high) if float((open_ * sizes).sum()) > target else (low, middle)
    return (low + high) / 2
