"""When heads are chosen, and when the factors of those that stay are trained.

Half of the heads at once is a leap: the gates then weigh heads against each other in a model that
random halves have left in pieces. So a large cut is made in rounds. Each removes its part of the
heads, lets the factors of the others make up for it, and hands a model that works to the next.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

# Of all heads, removed in one round. SmolLM2-135M without half of its heads, 300 steps in all,
# ratio of perplexities: one round 1.67, two 1.60 (two of equal length 1.71); one run each.
LARGEST_PART = 0.25


@dataclass(frozen=True)
class Round:
    """One round, in optimiser steps.

    Attributes:
        start: The step after which it begins.
        choose: The step after which its heads are chosen.
        end: The step after which it ends.
        part: Share of what the whole run removes that is gone once it ends.
    """

    start: int
    choose: int
    end: int
    part: float

    def share_chosen(self, step: int) -> float:
        """How much of the choosing is done, from 0 to 1."""
        return min(1.0, (step - self.start) / max(1, self.choose - self.start))

    def settled_rate(self, step: int) -> float:
        """Factor of the learning rate: 1 while heads are chosen, then linear to 0."""
        if step < self.choose:
            return 1.0
        return max(0.0, 1 - (step - self.choose) / max(1, self.end - self.choose))


def plan_rounds(steps: int, count: int, settle: float) -> list[Round]:
    """Splits a run into rounds that remove equal parts, later ones with more steps: 2 : 3 : 4 ...

    Args:
        steps: Optimiser steps of the run.
        count: Rounds; no more than steps are made.
        settle: Share of every round, at its end, in which the heads are chosen already.
    """
    count = min(count, steps)
    weights = [index + 2 for index in range(count)]  # what goes later matters more
    borders = [round(steps * sum(weights[:index]) / sum(weights)) for index in range(count + 1)]
    return [
        Round(start, start + round((end - start) * (1 - settle)), end, (index + 1) / count)
        for index, (start, end) in enumerate(itertools.pairwise(borders))
    ]


def default_count(removed: float) -> int:
    """As many rounds as keep each from removing (about) more than a quarter of all heads."""
    return max(1, math.ceil(removed / LARGEST_PART - 0.1))


def round_at(rounds: list[Round], step: int) -> Round:
    """The round that a step falls into: the first that has not ended."""
    return next((r for r in rounds if step < r.end), rounds[-1])
