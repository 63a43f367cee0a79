"""Does a limit hold? The whole interval must say so, in either direction.

passed         the interval lies on the good side
broken         the interval lies on the bad side
cannot decide  it holds the bound: more data would tell
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from enum import Enum
from fractions import Fraction

from pydantic import BaseModel, ConfigDict, model_validator

from headprune.evaluation.comparison import Interval, Statistic
from headprune.evaluation.metrics import spec_of
from headprune.evaluation.samples import Samples
from headprune.regression.limits import Comparison, Limit, Operator

_HOLDS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}
_OF = {
    Comparison.ABSOLUTE: "",
    Comparison.CHANGE: " since the baseline",
    Comparison.DIFFERENCE: " since the baseline",
    Comparison.SHARE: " of the original",
    Comparison.RECOVERY: " of the original's quality",
}


class Verdict(str, Enum):
    """What became of a limit."""

    PASSED = "passed"
    BROKEN = "broken"
    UNDECIDED = "cannot decide"


class Judged(BaseModel):
    """A limit and what was found. Percentages are shares of one here.

    Attributes:
        limit: As it was written.
        metric: Its metric.
        kind: What was compared: the metric itself, its change since the baseline, ...
        op: Side of the bound on which it must be.
        bound: The bound.
        value: What was found.
        low: Lower end of its interval; None for what is counted, not estimated.
        high: Upper end.
        confidence: Level of the interval.
        n: Windows, examples or repeats behind it.
        n_needed: With about so many the verdict would be clear, if it is not.
        verdict: Whether the limit holds.
        names: What was counted, by name, where that is told.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    limit: str
    metric: str
    kind: Comparison
    op: Operator
    bound: float | str
    value: float | str
    low: float | None = None
    high: float | None = None
    confidence: float | None = None
    n: int | None = None
    n_needed: int | None = None
    verdict: Verdict
    names: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _alike(self) -> Judged:
        if isinstance(self.bound, str) is not isinstance(self.value, str):
            raise ValueError("bound and value must both be numbers, or both names")
        return self

    def found(self) -> str:
        """What was found, in words."""
        number = f"{self.number()}{_OF[self.kind]}"
        if self.confidence is None:
            return number
        return f"{number} ({100 * self.confidence:g} % interval {self.interval()}, n={self.n})"

    def number(self) -> str:
        """What was found."""
        value = self.value if isinstance(self.value, str) else self._shown(self.value)
        return f"{value} ({', '.join(self.names)})" if self.names else value

    def interval(self) -> str:
        """Its interval; empty for what is counted."""
        if self.low is None or self.high is None:
            return ""
        return f"{self._shown(self.low)} to {self._shown(self.high)}"

    def advice(self) -> str:
        """What to do about a limit that is undecided; empty for the others."""
        if self.verdict is not Verdict.UNDECIDED:
            return ""
        about = f": about n={self.n_needed:,} would tell" if self.n_needed else ""
        return f"n={self.n} cannot tell, use more data{about}"

    def sentence(self) -> str:
        """The whole, on one line."""
        advice = self.advice()
        return (
            f"{self.limit}: {self.verdict.value}: {self.found()}{f'; {advice}' if advice else ''}"
        )

    def _shown(self, value: float) -> str:
        """With as many digits as it takes to tell it from the bound."""
        assert not isinstance(self.bound, str)
        scale, unit = (
            (100.0, " %")
            if self.kind not in (Comparison.ABSOLUTE, Comparison.DIFFERENCE)
            else (1, "")
        )
        sign = "+" if self.kind in (Comparison.CHANGE, Comparison.DIFFERENCE) else ""
        value, bound = scale * value, scale * self.bound
        if not math.isfinite(value):
            return str(value)
        if value == int(value) and not unit:
            return f"{value:{sign},.0f}"
        digits = next(
            (d for d in range(2 if unit else 4, 13) if round(value, d) != round(bound, d)), 2
        )
        return f"{value:{sign},.{digits}f}{unit}"


def compared(limit: Limit, ours: Samples, theirs: Samples | None) -> Statistic:
    """The number that the bound is for, as a function of the windows that count."""
    value = ours.statistic(limit.metric)
    if theirs is None:
        return value
    other, kind = theirs.statistic(limit.metric), limit.kind
    if kind is Comparison.CHANGE:
        return lambda i: value(i) / other(i) - 1
    if kind is Comparison.DIFFERENCE:
        return lambda i: value(i) - other(i)
    if kind is Comparison.RECOVERY and not spec_of(limit.metric).higher_is_better:
        return lambda i: other(i) / value(i)
    return lambda i: value(i) / other(i)


def with_rare_errors(interval: Interval, confidence: float, trials: int) -> Interval:
    """What no resample can show where all trials are right, or all wrong: the exact bound."""
    reach = ((1 - confidence) / 2) ** (1 / max(trials, 1))
    if interval.low == interval.high == 1.0:
        return replace(interval, low=reach)
    if interval.low == interval.high == 0.0:
        return replace(interval, high=1 - reach)
    return interval


def judge(limit: Limit, interval: Interval) -> Judged:
    """Judges what was estimated."""
    assert not isinstance(limit.bound, str)
    ends = [_HOLDS[limit.op](end, limit.bound) for end in (interval.low, interval.high)]
    verdict, needed = Verdict.UNDECIDED, None
    # one sequence has no interval, nor have resamples with next to nothing to compare with
    if interval.n < 2 or not interval.is_finite:
        pass
    elif all(ends):
        verdict = Verdict.PASSED
    elif not interval.low <= limit.bound <= interval.high:
        verdict = Verdict.BROKEN
    else:
        needed = _needed(interval, limit.bound)
    return Judged(
        limit=limit.text,
        metric=limit.metric,
        kind=limit.kind,
        op=limit.op,
        bound=limit.bound,
        value=interval.estimate,
        low=interval.low,
        high=interval.high,
        confidence=interval.confidence,
        n=interval.n,
        n_needed=needed,
        verdict=verdict,
    )


def judge_exact(limit: Limit, value: float | Fraction | str) -> Judged:
    """Judges what was counted or read."""
    # counts and their ratios are exact, and so is a bound as it was written
    counted = not isinstance(value, str) and not isinstance(limit.bound, str)
    bound = Fraction(repr(limit.bound)) if counted else limit.bound
    holds = _HOLDS[limit.op](value, bound)
    return Judged(
        limit=limit.text,
        metric=limit.metric,
        kind=limit.kind,
        op=limit.op,
        bound=limit.bound,
        value=value if isinstance(value, str) else float(value),
        verdict=Verdict.PASSED if holds else Verdict.BROKEN,
    )


def overall(judged: tuple[Judged, ...]) -> Verdict:
    """The worst of all verdicts."""
    found = {one.verdict for one in judged}
    order = (Verdict.BROKEN, Verdict.UNDECIDED, Verdict.PASSED)
    return next(verdict for verdict in order if verdict in found)


def _needed(interval: Interval, bound: float) -> int | None:
    """An interval shrinks with the root of n; from the estimate to the bound it must reach."""
    distance = abs(bound - interval.estimate)
    half = (interval.high if bound > interval.estimate else interval.low) - interval.estimate
    return math.ceil(interval.n * (half / distance) ** 2) if distance > 0 else None
