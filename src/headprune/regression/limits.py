"""What must hold, written as one line per limit.

    perplexity <= 25               absolute
    perplexity <= +2 %             change since the baseline
    accuracy >= -0.01              difference to the baseline: a sign, no percent
    perplexity recovery >= 98 %    of the original's quality: 100 % is as good
    perplexity <= 105 %            of the original's value
    kv_cache_bytes_per_token <= 50 %
    decode_tokens_per_s >= 120 %   of the original's speed, timed in the same run
    query_heads == 201             exact counts
    load_route == native           or runtime
    perplexity[brown] <= 105 %     on the further data of that name
    roles_lost == 0                roles of the original that no head has any more
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
from headprune.evaluation.metrics import METRICS, is_score, parted, spec_of
from headprune.registry import did_you_mean
from headprune.schemas.plan import Shape

STRUCTURE = (
    *("query_heads", "kv_heads", "parameters", "attention_parameters"),
    "kv_cache_bytes_per_token",
)
SPEED = ("prefill_tokens_per_s", "decode_tokens_per_s")
ROUTE = "load_route"
ROLES_LOST = "roles_lost"
KNOWN = (*METRICS, *STRUCTURE, *SPEED, ROUTE, ROLES_LOST)

Operator = Literal["<=", ">=", "=="]
_OPERATORS: tuple[Operator, ...] = get_args(Operator)

_METRIC = r"[\w.-]+:[\w.,-]+|\w+(?:\[[\w.-]+\])?"  # of a task, or on a domain
_LINE = re.compile(
    rf"(?P<metric>{_METRIC})(?P<recovery>\s+recovery)?\s*(?P<op>[<>=!]+)\s*(?P<bound>.+)"
)
_BOUND = re.compile(r"(?P<sign>[+-]?)\s*(?P<number>[\d._]+(?:[eE][+-]?\d+)?)\s*(?P<percent>%?)")


class Comparison(str, Enum):
    """What the number of a limit is compared with."""

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
        kind: What is compared.
        op: On which side of the bound the metric must be.
        bound: The bound; a share of one where a percentage was written, a name for load_route.
    """

    text: str
    metric: str
    kind: Comparison
    op: Operator
    bound: float | str

    @property
    def is_quality(self) -> bool:
        """Whether it is about what was measured on data or tasks."""
        return is_score(self.metric) or parted(self.metric)[0] in METRICS

    @property
    def percent(self) -> bool:
        """Whether its numbers are read as percentages."""
        return self.kind in (Comparison.CHANGE, Comparison.SHARE, Comparison.RECOVERY)

    @property
    def needs_baseline(self) -> bool:
        """Whether it is relative to the baseline."""
        return self.kind in (Comparison.CHANGE, Comparison.DIFFERENCE)

    @property
    def needs_original(self) -> bool:
        """Whether it is relative to the original."""
        shared = self.kind in (Comparison.SHARE, Comparison.RECOVERY)
        return shared or self.metric == ROLES_LOST


def parse_limit(text: str) -> Limit:
    """Reads one limit.

    Raises:
        HeadpruneError: If the metric is unknown, or the line makes no sense for it.
    """
    line = _LINE.fullmatch(text.strip())
    if line is None:
        raise HeadpruneError(
            f"The limit '{text}' has no direction: write the metric, <=, >= or ==, and a number, "
            "such as 'perplexity <= 25' or 'perplexity <= +2 %'."
        )
    metric, recovery = line["metric"], line["recovery"] is not None
    plain, domain = parted(metric)
    if not is_score(metric) and plain not in (METRICS if domain else KNOWN):
        known = list(METRICS if domain else KNOWN)
        raise HeadpruneError(
            f"The limit '{text}': there is no metric '{plain}'{' of data' if domain else ''}."
            f"{did_you_mean(plain, known)} Known are {', '.join(known)}."
        )
    op = next((known for known in _OPERATORS if known == line["op"]), None)
    if op is None:
        raise HeadpruneError(f"The limit '{text}': '{line['op']}' is none of <=, >= and ==.")
    if metric == ROUTE:
        return _route(text, op, line["bound"].strip(), recovery)
    bound = _BOUND.fullmatch(line["bound"].strip())
    try:
        number = float(f"{bound['sign']}{bound['number']}") if bound else None
    except ValueError:
        number = None
    if bound is None or number is None:
        raise HeadpruneError(
            f"The limit '{text}': '{line['bound'].strip()}' is no number; write one such as 25, "
            "+2 % (since the baseline) or 98 % (of the original)."
        )
    if not math.isfinite(number):
        raise HeadpruneError(f"The limit '{text}': the number is too large.")
    if bound["percent"]:
        number = float(Decimal(str(number)) / 100)  # 33.3 % is 0.333, to the last digit
    kind = _kind(text, metric, op, bound["sign"], bool(bound["percent"]), recovery)
    return Limit(text.strip(), metric, kind, op, number)


def _kind(text: str, metric: str, op: str, sign: str, percent: bool, recovery: bool) -> Comparison:
    """Which comparison is meant, if it makes sense for the metric."""
    if is_score(metric):
        return _of_score(text, metric, op, sign, percent, recovery)
    if metric == ROLES_LOST and (sign or percent or recovery or op == ">="):
        raise HeadpruneError(
            f"The limit '{text}': {ROLES_LOST} counts roles of the original. Write "
            f"'{ROLES_LOST} == 0', or '<= 1'."
        )
    quality, speed = parted(metric)[0] in METRICS, metric in SPEED
    higher_is_better = spec_of(metric).higher_is_better if quality else speed
    if recovery and not quality:
        raise HeadpruneError(
            f"The limit '{text}': a recovery is the share of the original's quality that is left, "
            f"and {metric} has no direction in which it is better. Write '{metric} <= 75 %'."
        )
    if recovery and (sign or not percent):
        raise HeadpruneError(f"The limit '{text}': a recovery is a plain percentage, as '>= 98 %'.")
    if speed and (sign or not percent):
        raise HeadpruneError(
            f"The limit '{text}': a speed on its own says more of the machine than of the model. "
            f"Write it as a share of the original's in the same run: '{metric} >= 95 %'."
        )
    if sign:
        kind = Comparison.CHANGE if percent else Comparison.DIFFERENCE
    elif not percent:
        kind = Comparison.ABSOLUTE
    else:  # "perplexity <= 105 %" is of its value; everything else of quality is a recovery
        plain = not quality or (not recovery and not higher_is_better and op == "<=")
        kind = Comparison.SHARE if plain else Comparison.RECOVERY
    wanted = ">=" if higher_is_better or kind is Comparison.RECOVERY else "<="
    if (quality or speed) and op != wanted:
        raise HeadpruneError(
            f"The limit '{text}': better models have a {'higher' if wanted == '>=' else 'lower'} "
            f"{'recovery' if kind is Comparison.RECOVERY else metric}, so it must be bounded by "
            f"{wanted}."
        )
    return kind


def _of_score(
    text: str, metric: str, op: str, sign: str, percent: bool, recovery: bool
) -> Comparison:
    """Which comparison is meant; lm-eval says which side of a score is better, once it has run."""
    if recovery or op == "==":
        raise HeadpruneError(
            f"The limit '{text}': bound the score of a task by <= or >=, as '{metric} >= 98 %' (of "
            "the original's)."
        )
    if sign:
        return Comparison.CHANGE if percent else Comparison.DIFFERENCE
    return Comparison.SHARE if percent else Comparison.ABSOLUTE


def _route(text: str, op: str, bound: str, recovery: bool) -> Limit:
    routes = [shape.value for shape in Shape]
    if op != "==" or bound not in routes or recovery:
        raise HeadpruneError(
            f"The limit '{text}': a load route is compared by name, {ROUTE} == {routes[0]} or "
            f"{ROUTE} == {routes[1]}.{did_you_mean(bound, routes) if bound not in routes else ''}"
        )
    return Limit(text.strip(), ROUTE, Comparison.ABSOLUTE, "==", bound)
