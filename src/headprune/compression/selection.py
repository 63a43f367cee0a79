"""Which of several models comes nearest to the original on held-out text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headprune.compression.goals import SizeGoal
from headprune.compression.heldout import HeldOut, Measure
from headprune.config import Dtype
from headprune.context import Allowed
from headprune.evaluation.comparison import bootstrap
from headprune.evaluation.metrics import Floats
from headprune.model.attention import attention_of
from headprune.model.cost import GENERATES, kv_cache_elements_per_token
from headprune.model.loading import task_of
from headprune.model.opening import load
from headprune.model.stored import stored_dtypes, stored_tensors
from headprune.schemas.records import Contender, ModelChoice

ORIGINAL = "original"
CONFIDENCE = 0.95
_RESAMPLES = 2000
Progress = Callable[[int, int], None]


class Selection:
    """Measures models beside the original, and ranks them.

    Args:
        held_out: The text that they are measured on.
        dtype: Element type that they compute in.
        seed: Seed of what is random.
        progress: Called with sequences done and sequences in all.
        goal: What may stay.
    """

    def __init__(
        self, held_out: HeldOut, dtype: Dtype, seed: int, progress: Progress, goal: SizeGoal
    ) -> None:
        self.held_out, self.measure, self._goal = held_out, held_out.measure, goal
        self._dtype, self._seed, self._progress = dtype, seed, progress
        self.contenders: list[Contender] = []
        self._rows: dict[str, Floats] = {}  # by contender: how near it comes, by reporting sequence
        self.failed: dict[str, str] = {}

    def begin(self, net: PreTrainedModel, place: str | Path) -> None:
        """Measures the original, which all others are compared with."""
        self._outputs = self.held_out.outputs(net, self._progress)
        self.original = self._measured(ORIGINAL, net, place, 0.0)

    def add(self, name: str, folder: Path, seconds: float, allowed: Allowed) -> bool:
        """Measures a model, and says whether it meets the goal and is better than all before.

        Args:
            name: What it is.
            folder: Where it lies.
            seconds: How long it took to make.
            allowed: What it may bring.
        """
        net, _ = load(folder, self._dtype, allowed)
        found = self._measured(name, net, folder, seconds)
        missed = self._goal.missed(found)
        if missed is not None:
            self.failed[name] = missed
            return False
        self.contenders.append(found)
        self.contenders.sort(key=self._cost)  # of equals, the first stays before the others
        return self.contenders[0] is found

    def concluded(self) -> ModelChoice:
        """The record of it."""
        return ModelChoice(
            goal=self._goal.said,
            measure=self.measure.name,
            higher_is_better=self.measure.higher_is_better,
            held_out_tokens=self.held_out.tokens,
            original=self.original,
            contenders=tuple(self.contenders),
            lead=self._lead(),
            failed=self.failed,
        )

    def _lead(self) -> tuple[float, float] | None:
        two = [self._rows[one.name] for one in self.contenders[:2]]
        return lead(self.measure, *two) if len(two) == 2 else None

    def _cost(self, contender: Contender) -> tuple[float, float]:
        cost = -contender.chosen_by if self.measure.higher_is_better else contender.chosen_by
        return cost, contender.copying_nll or 0.0

    def _measured(
        self, name: str, net: PreTrainedModel, place: str | Path, seconds: float
    ) -> Contender:
        outputs = self._outputs
        if name != ORIGINAL:
            outputs = self.held_out.outputs(net, self._progress)
        choosing, by_text = (
            self.held_out.compared(outputs, self._outputs, reports) for reports in (False, True)
        )
        self._rows[name] = np.concatenate(list(by_text.values()))
        number = self.measure.number
        attentions, cached = attention_of(net), 0
        if task_of(net) in GENERATES:
            stored = stored_dtypes(net, stored_tensors(place)).default
            cached = kv_cache_elements_per_token(net) * stored.itemsize
        return Contender(
            name=name,
            chosen_by=float(number(np.concatenate(list(choosing.values())))),
            held_out=float(number(self._rows[name])),
            by_text={text: float(number(rows)) for text, rows in by_text.items()},
            copying_nll=self.held_out.copying(net, self._seed),
            parameters=net.num_parameters(),
            kv_cache_bytes_per_token=cached,
            query_heads=sum(a.query_heads for a in attentions),
            kv_heads=sum(a.kv_heads for a in attentions),
            seconds=seconds,
        )


def lead(measure: Measure, first: Floats, second: Floats) -> tuple[float, float] | None:
    """How much better one model is than another, as an interval over the held-out sequences.

    Args:
        measure: What they are judged by.
        first: Rows of the one, (sequences, 2), as of ``Measure.rows``.
        second: Rows of the other, of the same sequences.

    Returns:
        Both ends; None where there is too little to draw from.
    """
    if len(first) < 2:
        return None
    sign = 1 if measure.higher_is_better else -1

    def difference(drawn: NDArray[np.int64]) -> Any:
        return sign * (measure.number(first[drawn]) - measure.number(second[drawn]))

    one_text = np.zeros(len(first), np.int64)
    found = bootstrap(difference, len(first), _RESAMPLES, CONFIDENCE, 0, documents=one_text)
    return (found.low, found.high) if found.is_finite else None
