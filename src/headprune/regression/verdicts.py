"""Does a limit hold? The whole interval must say so, in either direction.

passed         the interval lies on the good side
broken         the interval lies on the bad side
cannot decide  it holds the bound: more data would tell; nor do fewer than ten losses ever pass
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from enum import Enum
from fractions import Fraction
from typing import Any

import numpy as np
from pydantic import model_validator
from transformers import PreTrainedModel

from headprune.config import CheckConfig
from headprune.errors import CheckpointError, DataError, HeadpruneError
from headprune.evaluation.comparison import FEWEST, Interval, bootstrap
from headprune.evaluation.evaluate import EvaluationRun
from headprune.evaluation.metrics import (
    Floats,
    Samples,
    columns_of,
    in_k,
    interval_of,
    is_score,
    plain,
    spec_of,
)
from headprune.model.cost import ModelCost
from headprune.regression.baseline import Baseline
from headprune.regression.limits import ROUTE, SPEED, STRUCTURE, Comparison, Limit, Operator
from headprune.schemas.plan import Shape
from headprune.schemas.values import Record

_HOLDS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}
_OF = {
    Comparison.ABSOLUTE: "",
    Comparison.CHANGE: " since the baseline",
    Comparison.DIFFERENCE: " since the baseline",
    Comparison.SHARE: " of the original",
    Comparison.RECOVERY: " of the original's quality",
}


class Verdict(str, Enum):
    """The verdict on a limit."""

    PASSED = "passed"
    BROKEN = "broken"
    UNDECIDED = "cannot decide"


class Judged(Record):
    """A limit and its measurement. Percentages are fractions here.

    Attributes:
        limit: As it was written.
        metric: Its metric.
        kind: The compared number: the metric itself, its change since the baseline, ...
        op: The side of the bound where it must be.
        bound: The bound.
        value: The measured value.
        low: Lower end of its interval; None for counts, which are exact, and for too few examples.
        high: Upper end.
        confidence: Level of the interval.
        n: Windows, examples or repeats behind it.
        n_needed: About how many would make an undecided verdict clear.
        verdict: Whether the limit holds.
    """

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

    @model_validator(mode="after")
    def _alike(self) -> Judged:
        if isinstance(self.bound, str) is not isinstance(self.value, str):
            raise ValueError("bound and value must both be numbers, or both names")
        return self

    def found(self) -> str:
        """Return the value in words, with its interval."""
        number = f"{self.number()}{_OF[self.kind]}"
        if self.confidence is None:
            return number
        range_ = f"{100 * self.confidence:g} % interval {self.interval() or 'unknown'}"
        return f"{number} ({range_}, n={self.n})"

    def number(self) -> str:
        """Return the value as text."""
        return self.value if isinstance(self.value, str) else self._shown(self.value)

    def interval(self) -> str:
        """Return its interval as text; empty for a count."""
        if self.low is None or self.high is None:
            return ""
        return f"{self._shown(self.low)} to {self._shown(self.high)}"

    def advice(self) -> str:
        """Return the remedy for an undecided limit; empty for the others."""
        if self.verdict is not Verdict.UNDECIDED:
            return ""
        about = f": about n={self.n_needed:,} would tell" if self.n_needed else ""
        return f"n={self.n} cannot tell, use more data{about}"

    def sentence(self) -> str:
        """Return the whole, on one line."""
        parts = (f"{self.limit}: {self.verdict.value}: {self.found()}", self.advice())
        return "; ".join(filter(None, parts))

    def _shown(self, value: float) -> str:
        """Return a value with enough digits to tell it from the bound."""
        assert not isinstance(self.bound, str)
        plain = self.kind in (Comparison.ABSOLUTE, Comparison.DIFFERENCE)
        scale, unit = (1, "") if plain else (100.0, " %")
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


def judge(limit: Limit, interval: Interval) -> Judged:
    """Return the verdict on an estimate."""
    assert not isinstance(limit.bound, str)
    ends = [_HOLDS[limit.op](end, limit.bound) for end in (interval.low, interval.high)]
    verdict, needed = Verdict.UNDECIDED, None
    # one sequence has no interval, nor have resamples with next to nothing to compare with
    if interval.n < 2 or not interval.is_finite:
        pass
    elif all(ends) and interval.n < FEWEST and _is_boundless(limit):
        needed = FEWEST
    elif all(ends):
        verdict = Verdict.PASSED
    elif not interval.low <= limit.bound <= interval.high:
        verdict = Verdict.BROKEN
    else:
        needed = _needed(interval, limit.bound)
    measured: dict[str, Any] = {"confidence": interval.confidence, "n": interval.n}
    if interval.n > 1 and interval.is_finite:
        measured |= {"low": interval.low, "high": interval.high}
    return _judged(limit, interval.estimate, verdict, **measured, n_needed=needed)


def _is_boundless(limit: Limit) -> bool:
    """Return whether a single example may change a metric by any amount, as a loss may."""
    spec = spec_of(limit.metric) if limit.is_quality else None
    return spec is not None and not spec.proportion and spec.scale is None


def judge_exact(limit: Limit, value: float | Fraction | str) -> Judged:
    """Return the verdict on a count or a name."""
    # counts and their ratios are exact, and so is a bound as it was written
    counted = not isinstance(value, str) and not isinstance(limit.bound, str)
    bound = Fraction(repr(limit.bound)) if counted else limit.bound
    verdict = Verdict.PASSED if _HOLDS[limit.op](value, bound) else Verdict.BROKEN
    return _judged(limit, value if isinstance(value, str) else float(value), verdict)


def _judged(limit: Limit, value: float | str, verdict: Verdict, **interval: Any) -> Judged:
    about = {name: getattr(limit, name) for name in ("metric", "kind", "op", "bound")}
    return Judged(limit=limit.text, value=value, verdict=verdict, **about, **interval)


def overall(judged: tuple[Judged, ...]) -> Verdict:
    """Return the worst of all verdicts."""
    verdicts = {one.verdict for one in judged}
    order = (Verdict.BROKEN, Verdict.UNDECIDED, Verdict.PASSED)
    return next(verdict for verdict in order if verdict in verdicts)


def _needed(interval: Interval, bound: float) -> int | None:
    """An interval shrinks with the root of n; from the estimate to the bound it must reach."""
    distance = abs(bound - interval.estimate)
    half = (interval.high if bound > interval.estimate else interval.low) - interval.estimate
    return math.ceil(interval.n * (half / distance) ** 2) if distance > 0 else None


def structure_of(cost: ModelCost) -> dict[str, int]:
    """Return the counts and bytes that can be limited, by the names of limits."""
    at = {f"kv_cache_bytes@{in_k(n)}": size for n, size in cost.kv_cache_bytes_at.items()}
    return {name: getattr(cost, name) for name in STRUCTURE} | at


def load_route(net: PreTrainedModel) -> str:
    """Return whether transformers alone loads a model, or the runtime that lies beside it."""
    shape = Shape.RUNTIME if getattr(net.config, "headprune", None) else Shape.NATIVE
    return str(shape.value)


def judge_limit(
    limit: Limit,
    evaluation: EvaluationRun,
    route: str,
    baseline: Baseline | None,
    ratios: Mapping[str, Floats],
    config: CheckConfig,
) -> Judged:
    """Return the verdict on a limit.

    Args:
        limit: The limit.
        evaluation: The measurements, of the original too if a limit needs it.
        route: The load route of the model.
        baseline: The stored one, if a limit refers to it.
        ratios: Speed over the original's, run by run, of the metrics of speed.
        config: Confidence, resamples and seed.

    Raises:
        HeadpruneError: If there is nothing to compare with.
    """
    how = (config.resamples, config.confidence, config.seed)
    report, metric = evaluation.report, limit.metric
    if metric == ROUTE:
        return judge_exact(limit, route)
    if plain(metric) in STRUCTURE:
        reference = baseline.structure if baseline is not None else {}
        if limit.needs_original:
            reference = structure_of(report.against.cost) if report.against is not None else {}
        value = structure_of(report.model.cost)[metric]
        return judge_exact(limit, counted(limit, value, reference.get(metric)))
    if plain(metric) in SPEED:
        faster = ratios[metric]  # the median, as a machine stumbles now and then
        middle = bootstrap(lambda i: np.median(faster[i], axis=-1), len(faster), *how)
        return judge(limit, middle)
    ours, theirs = evaluation.samples[0], None
    if metric not in ours.metrics():
        raise DataError(_not_measured(limit, ours))
    n = ours.count(metric)
    if limit.needs_baseline:
        assert baseline is not None
        theirs = baseline.as_samples()
        if {len(theirs.columns[name]) for name in columns_of(metric)} != {n}:
            raise CheckpointError(
                f"The baseline '{config.baseline}' holds {theirs.count(metric)} windows or "
                f"examples for {metric}, and this run made {n} of the same data: the file was "
                "edited. Write it anew with --update-baseline."
            )
    elif limit.needs_original:
        theirs = evaluation.samples[1]
    if limit.percent and theirs is not None:
        _refuse_share_of_nothing(limit, theirs)
    return judge(limit, interval_of(metric, number_of(limit), ours, theirs, *how))


def number_of(limit: Limit) -> Callable[[Any, Any], Any]:
    """Return the number that the bound is for, as a function of the values of model and base."""
    if limit.kind is Comparison.ABSOLUTE:
        return lambda ours, theirs: ours
    if limit.kind is Comparison.CHANGE:
        return lambda ours, theirs: ours / theirs - 1
    if limit.kind is Comparison.DIFFERENCE:
        return operator.sub
    if limit.kind is Comparison.RECOVERY and not spec_of(limit.metric).higher_is_better:
        return lambda ours, theirs: theirs / ours
    return operator.truediv


def counted(limit: Limit, value: int, reference: int | None) -> Fraction:
    """Return a count in the terms of a limit, exactly.

    Raises:
        HeadpruneError: If there is nothing to compare with.
    """
    if limit.kind is Comparison.ABSOLUTE:
        return Fraction(value)
    if reference is None:
        raise CheckpointError(
            f"The baseline has no {limit.metric}. Write it anew with --update-baseline."
        )
    if limit.kind is Comparison.DIFFERENCE:
        return Fraction(value - reference)
    if reference == 0:
        raise HeadpruneError(
            f"The limit '{limit.text}' is a share of 0: there is no {limit.metric} to compare with."
        )
    return Fraction(value, reference) - (1 if limit.kind is Comparison.CHANGE else 0)


def _not_measured(limit: Limit, ours: Samples) -> str:
    if not is_score(limit.metric):
        return (
            f"The limit '{limit.text}': the data has no sequence to measure {limit.metric} on. "
            "Give more text, or a larger --seq-len."
        )
    known = ", ".join(filter(is_score, ours.metrics())) or "none; see --tasks"
    return (
        f"The limit '{limit.text}': no task gives {limit.metric} example by example. Scores that "
        f"can be limited: {known}."
    )


def _refuse_share_of_nothing(limit: Limit, theirs: Samples) -> None:
    reference = float(theirs.statistic(limit.metric)(np.arange(theirs.count(limit.metric))))
    if not (math.isfinite(reference) and reference > 0):
        raise HeadpruneError(
            f"The limit '{limit.text}' is a share of {reference:.4g}: write a difference, such as "
            f"'{limit.metric} >= -0.01'."
        )
