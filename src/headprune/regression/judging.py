"""How a limit is judged by what was measured."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from headprune.config import CheckConfig
from headprune.errors import CheckpointError, DataError, HeadpruneError
from headprune.evaluation.comparison import Interval, Numbers, Statistic, bootstrap
from headprune.evaluation.evaluate import EvaluationRun
from headprune.evaluation.loaded import Loaded
from headprune.evaluation.metrics import is_score, parted, within
from headprune.evaluation.samples import Samples
from headprune.model.cost import ModelCost
from headprune.regression.baseline import Baseline
from headprune.regression.limits import ROUTE, SPEED, STRUCTURE, Comparison, Limit
from headprune.regression.verdicts import Judged, compared, judge, judge_exact, with_rare_errors
from headprune.schemas.plan import Shape

# shares of what is right or wrong; those of some of the examples, with the column that counts them
_SHARES = {
    "accuracy": None,
    "needle_accuracy": None,
    "last_word_accuracy": None,
    "seen_last_word_accuracy": "seen_last_words",
}


def structure_of(cost: ModelCost) -> dict[str, int]:
    """Counts and bytes that limits may be on."""
    return {name: getattr(cost, name) for name in STRUCTURE}


def load_route(net: PreTrainedModel) -> str:
    """Whether transformers alone loads a model, or the runtime that lies beside it."""
    shape = Shape.RUNTIME if getattr(net.config, "headprune", None) else Shape.NATIVE
    return str(shape.value)


def judge_limit(
    limit: Limit,
    loaded: Loaded,
    evaluation: EvaluationRun,
    baseline: Baseline | None,
    ratios: dict[str, Any],
    config: CheckConfig,
) -> Judged:
    """Judges a limit.

    Args:
        limit: The limit.
        loaded: What was measured.
        evaluation: Its quality, of the original too if a limit needs it.
        baseline: The stored one, if a limit refers to it.
        ratios: Speed over the original's, run by run, of the metrics of speed.
        config: How.

    Raises:
        HeadpruneError: If there is nothing to compare with.
    """
    report = evaluation.report
    if limit.metric == ROUTE:
        return judge_exact(limit, load_route(loaded.nets[0]))
    if limit.metric in STRUCTURE:
        then = baseline.structure if baseline is not None else {}
        other = structure_of(report.against.cost) if report.against is not None else {}
        reference = other if limit.needs_original else then
        value = structure_of(report.model.cost)[limit.metric]
        return judge_exact(limit, counted(limit, value, reference.get(limit.metric)))
    if limit.metric in SPEED:
        faster = ratios[limit.metric]  # the median, as a machine stumbles now and then
        interval = _interval(lambda i: np.median(faster[i], axis=-1), len(faster), config)
        return judge(limit, interval)
    ours = evaluation.samples[0]
    if limit.metric not in ours.metrics():
        raise DataError(_not_measured(limit, ours))
    theirs = None
    if limit.needs_baseline:
        assert baseline is not None
        theirs = baseline.as_samples()
        if theirs.count(limit.metric) != ours.count(limit.metric):
            raise CheckpointError(
                f"The baseline '{config.baseline}' holds {theirs.count(limit.metric)} windows or "
                f"examples for {limit.metric}, and this run made {ours.count(limit.metric)} of the "
                "same data: the file was edited. Write it anew with --update-baseline."
            )
    elif limit.needs_original:
        theirs = evaluation.samples[1]
    if limit.percent and theirs is not None:
        _refuse_share_of_nothing(limit, theirs)
    statistic, count = compared(limit, ours, theirs), ours.count(limit.metric)
    interval = _interval(statistic, count, config, ours.documents_of(limit.metric))
    name, domain = parted(limit.metric)
    if name in _SHARES and limit.kind is Comparison.ABSOLUTE:
        column = _SHARES[name]
        trials = int(ours.columns[within(column, domain)].sum()) if column else count
        interval = with_rare_errors(interval, config.confidence, trials)
    return judge(limit, interval)


def _not_measured(limit: Limit, ours: Samples) -> str:
    if not is_score(limit.metric):
        return (
            f"The limit '{limit.text}': the data has no sequence of which {limit.metric} could be "
            "measured. Give more text, or a larger --seq-len."
        )
    known = ", ".join(filter(is_score, ours.metrics())) or "none; see --tasks"
    return (
        f"The limit '{limit.text}': no task gives {limit.metric} example by example. Scores that "
        f"can be limited: {known}."
    )


def _refuse_share_of_nothing(limit: Limit, theirs: Samples) -> None:
    every = np.arange(theirs.count(limit.metric))
    reference = float(theirs.statistic(limit.metric)(every))
    if not (math.isfinite(reference) and reference > 0):
        raise HeadpruneError(
            f"The limit '{limit.text}' is a share of {reference:.4g}: write a difference, such as "
            f"'{limit.metric} >= -0.01'."
        )


def counted(limit: Limit, value: int, reference: int | None) -> Fraction:
    """What a count comes to in the terms of a limit, exactly.

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


def _interval(
    statistic: Statistic, n: int, config: CheckConfig, documents: Numbers | None = None
) -> Interval:
    return bootstrap(statistic, n, config.resamples, config.confidence, config.seed, documents)
