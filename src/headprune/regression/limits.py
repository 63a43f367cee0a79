"""Limits, one line each.

    perplexity <= 25               absolute
    perplexity <= +2 %             change since the baseline
    accuracy >= -0.01              difference to the baseline: a sign, no percent
    perplexity recovery >= 98 %    of the original's quality
    perplexity <= 105 %            of the original's value
    kv_cache_bytes <= 50 %
    kv_cache_bytes@8k <= 50 %      of a context of 8,192 tokens
    perplexity@1k-2k <= 105 %      of the tokens at these positions
    decode_tokens_per_s >= 120 %   of the original's speed, timed in the same run
    decode_tokens_per_s@8k >= 1 %  after a prompt of 8,192 tokens
    query_heads == 201             exact counts
    load_route == native           or runtime
    perplexity[brown] <= 105 %     on the further data of that name
    lambada_openai:acc >= 0.3      a score of a task of lm-eval

A sign makes it relative to the baseline, a percent sign without one to the original.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Literal, get_args

from headprune.errors import HeadpruneError
from headprune.evaluation.metrics import METRICS, context_of, is_score, parted, plain, spec_of
from headprune.registry import did_you_mean
from headprune.schemas.plan import Shape

STRUCTURE = (
    *("query_heads", "kv_heads", "parameters", "attention_parameters"),
    "kv_cache_bytes",
)
SPEED = ("prefill_tokens_per_s", "decode_tokens_per_s")
ROUTE = "load_route"
KNOWN = (*METRICS, *STRUCTURE, *SPEED, ROUTE)

Operator = Literal["<=", ">=", "=="]

# of a task, or at a range or a context, and on a domain
_METRIC = r"[\w.-]+:[\w.,-]+|\w+(?:@[\w-]+)?(?:\[[\w.-]+\])?"
_LINE = re.compile(
    rf"(?P<metric>{_METRIC})(?P<recovery>\s+recovery)?\s*(?P<op>[<>=!]+)\s*(?P<bound>.+)"
)
_BOUND = re.compile(r"(?P<sign>[+-]?)\s*(?P<number>[\d._]+(?:[eE][+-]?\d+)?)\s*(?P<percent>%?)")


class Comparison(str, Enum):
    """The reference of a limit's number."""

    ABSOLUTE = "absolute"  # the metric itself
    CHANGE = "change"  # metric / baseline - 1
    DIFFERENCE = "difference"  # metric - baseline
    SHARE = "share"  # metric / original
    RECOVERY = "recovery"  # metric / original, or its inverse where lower is better


@dataclass(frozen=True)
class Limit:
    """One limit.

    Attributes:
        text: As it was written.
        metric: Its metric.
        kind: Its reference.
        op: The side of the bound where the metric must be.
        bound: The bound; a share of one where a percentage was written, a name for load_route.
    """

    text: str
    metric: str
    kind: Comparison
    op: Operator
    bound: float | str

    @property
    def is_quality(self) -> bool:
        """True if it is on a metric of data or of tasks."""
        return is_score(self.metric) or plain(self.metric) in METRICS

    @property
    def percent(self) -> bool:
        """True if its numbers are read as percentages."""
        return self.kind in (Comparison.CHANGE, Comparison.SHARE, Comparison.RECOVERY)

    @property
    def needs_baseline(self) -> bool:
        """True if it is relative to the baseline."""
        return self.kind in (Comparison.CHANGE, Comparison.DIFFERENCE)

    @property
    def needs_original(self) -> bool:
        """True if it is relative to the original."""
        return self.kind in (Comparison.SHARE, Comparison.RECOVERY)


def parse_limit(text: str) -> Limit:
    """Return the limit that a line says.

    Raises:
        HeadpruneError: If the metric is unknown, or the line makes no sense for it.
    """
    try:
        return _parsed(text.strip())
    except _Problem as why:
        raise HeadpruneError(f"The limit '{text}': {why}") from None


class _Problem(Exception):
    """Why a line is no limit."""


def _parsed(text: str) -> Limit:
    line = _LINE.fullmatch(text)
    if line is None:
        raise _Problem(
            "it has no direction: write the metric, <=, >= or ==, and a number, such as "
            "'perplexity <= 25' or 'perplexity <= +2 %'."
        )
    metric, op, recovery = line["metric"], line["op"], line["recovery"] is not None
    name, domain = plain(metric), parted(metric)[1]
    known = list(METRICS if domain else KNOWN)
    if not is_score(metric) and name not in known:
        raise _Problem(
            f"there is no metric '{name}'{' of data' if domain else ''}."
            f"{did_you_mean(name, known)} Known are {', '.join(known)}."
        )
    if name == ROUTE and metric != ROUTE:
        raise _Problem(f"{ROUTE} is of the whole model: leave out what stands behind it.")
    if name in SPEED and metric != name and context_of(metric) is None:
        raise _Problem(f"'{metric}' has no context: write it as '{name}@8k', of 8,192 tokens.")
    operator = next((one for one in get_args(Operator) if one == op), None)
    if operator is None:
        raise _Problem(f"'{op}' is none of <=, >= and ==.")
    if metric == ROUTE:
        return _route(text, op, line["bound"].strip(), recovery)
    bound = _BOUND.fullmatch(line["bound"].strip())
    try:
        number = float(f"{bound['sign']}{bound['number']}") if bound else None
    except ValueError:
        number = None
    if bound is None or number is None:
        raise _Problem(
            f"'{line['bound'].strip()}' is no number; write one such as 25, +2 % (since the "
            "baseline) or 98 % (of the original)."
        )
    if not math.isfinite(number):
        raise _Problem("the number is too large.")
    if bound["percent"]:
        number = float(Decimal(str(number)) / 100)  # 33.3 % is 0.333, to the last digit
    kind = _kind(metric, op, bound["sign"], bool(bound["percent"]), recovery)
    return Limit(text, metric, kind, operator, number)


def _kind(metric: str, op: str, sign: str, percent: bool, recovery: bool) -> Comparison:
    """Return the comparison, if it makes sense for the metric."""
    score, speed = is_score(metric), plain(metric) in SPEED
    quality = not score and plain(metric) in METRICS
    higher_is_better = spec_of(metric).higher_is_better if quality else speed
    if score and (recovery or op == "=="):  # its direction is known once the task has run
        raise _Problem(
            f"bound the score of a task by <= or >=, as '{metric} >= 98 %' (of the original's)."
        )
    if recovery and (not quality or sign or not percent):
        raise _Problem(
            "a recovery is a plain percentage of the original's quality, as 'perplexity recovery "
            ">= 98 %'."
        )
    if speed and (sign or not percent):
        raise _Problem(
            "a speed on its own says more of the machine than of the model. Write it as a share "
            f"of the original's in the same run: '{metric} >= 95 %'."
        )
    if sign:
        kind = Comparison.CHANGE if percent else Comparison.DIFFERENCE
    elif not percent:
        kind = Comparison.ABSOLUTE
    elif not quality or (op == "<=" and not higher_is_better and not recovery):
        kind = Comparison.SHARE  # "perplexity <= 105 %" is of its value
    else:
        kind = Comparison.RECOVERY
    wanted = ">=" if higher_is_better or kind is Comparison.RECOVERY else "<="
    if (quality or speed) and op != wanted:
        raise _Problem(
            f"better models have a {'higher' if wanted == '>=' else 'lower'} "
            f"{'recovery' if kind is Comparison.RECOVERY else metric}, so it must be bounded by "
            f"{wanted}."
        )
    return kind


def _route(text: str, op: str, bound: str, recovery: bool) -> Limit:
    routes = [shape.value for shape in Shape]
    if op != "==" or bound not in routes or recovery:
        raise _Problem(
            f"a load route is compared by name, {ROUTE} == {routes[0]} or "
            f"{ROUTE} == {routes[1]}.{did_you_mean(bound, routes) if bound not in routes else ''}"
        )
    return Limit(text, ROUTE, Comparison.ABSOLUTE, "==", bound)
