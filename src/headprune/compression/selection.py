"""Choice of the model nearest to the original on held-out text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headprune.compression.goals import SizeGoal
from headprune.compression.heldout import HeldOut, Measure, Outputs
from headprune.evaluation.comparison import bootstrap
from headprune.evaluation.metrics import Floats
from headprune.model.attention import attention_of
from headprune.model.cost import GENERATES, kv_cache_elements_per_token
from headprune.model.loading import task_of
from headprune.model.open import Model
from headprune.schemas.records import Contender, ModelChoice
from headprune.surgery.edit import Edit, sketch, trying

ORIGINAL = "original"
CONFIDENCE = 0.95
_RESAMPLES = 2000
Progress = Callable[[int, int], None]


class Selection:
    """Measures models beside the original, and ranks them.

    Args:
        held_out: The text that they are measured on.
        seed: Seed of all draws.
        progress: Called with sequences done and sequences in all.
        goal: What may stay.
    """

    def __init__(self, held_out: HeldOut, seed: int, progress: Progress, goal: SizeGoal) -> None:
        self.held_out, self.measure, self._goal = held_out, held_out.measure, goal
        self._seed, self._progress = seed, progress
        self.contenders: list[Contender] = []
        self._rows: dict[str, Floats] = {}  # by contender: how near it comes, by reporting sequence
        self.failed: dict[str, str] = {}

    def begin(self, model: Model) -> None:
        """Measure the original, which all others are compared with."""
        self._outputs = self.held_out.outputs(model.net, self._progress)
        copying = self.held_out.copying(model.net, self._seed)
        stored = model.result_dtypes().default
        self.original = self._measured(ORIGINAL, self._outputs, copying, model.net, stored, 0.0)

    def add(self, name: str, model: Model, edit: Edit, seconds: float) -> bool:
        """Measure an edit in memory; return whether it meets the goal and is the best so far.

        Args:
            name: Name of the candidate.
            model: The model.
            edit: The edit.
            seconds: Time that it took.
        """
        with trying(model.net, edit):
            outputs = self.held_out.outputs(model.net, self._progress)
            copying = self.held_out.copying(model.net, self._seed)
        stored = model.result_dtypes().default
        return self._add(name, outputs, copying, sketch(model, edit), stored, seconds)

    def add_result(self, name: str, model: Model, seconds: float) -> bool:
        """Measure a model that was written; see ``add``."""
        outputs = self.held_out.outputs(model.net, self._progress)
        copying = self.held_out.copying(model.net, self._seed)
        return self._add(name, outputs, copying, model.net, model.result_dtypes().default, seconds)

    def _add(
        self,
        name: str,
        outputs: Outputs,
        copying: float | None,
        net: PreTrainedModel,
        stored: torch.dtype,
        seconds: float,
    ) -> bool:
        found = self._measured(name, outputs, copying, net, stored, seconds)
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
        self,
        name: str,
        outputs: Outputs,
        copying: float | None,
        net: PreTrainedModel,
        stored: torch.dtype,
        seconds: float,
    ) -> Contender:
        choosing, by_text = (
            self.held_out.compared(outputs, self._outputs, reports) for reports in (False, True)
        )
        self._rows[name] = np.concatenate(list(by_text.values()))
        number = self.measure.number
        attentions, cached = attention_of(net), 0
        if task_of(net) in GENERATES:
            cached = kv_cache_elements_per_token(net) * stored.itemsize
        return Contender(
            name=name,
            chosen_by=float(number(np.concatenate(list(choosing.values())))),
            held_out=float(number(self._rows[name])),
            by_text={text: float(number(rows)) for text, rows in by_text.items()},
            copying_nll=copying,
            parameters=net.num_parameters(),
            kv_cache_bytes_per_token=cached,
            query_heads=sum(a.query_heads for a in attentions),
            kv_heads=sum(a.kv_heads for a in attentions),
            seconds=seconds,
        )


def lead(measure: Measure, first: Floats, second: Floats) -> tuple[float, float] | None:
    """Return the lead of one model over another, as an interval over held-out sequences.

    Args:
        measure: Their measure.
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
