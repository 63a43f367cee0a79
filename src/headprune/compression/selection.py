"""Choice of the model nearest to the original on held-out text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.compression.goals import SizeGoal
from headprune.compression.heldout import HeldOut
from headprune.model.attention import attention_of
from headprune.model.cost import GENERATES, kv_cache_elements_per_token
from headprune.model.loading import task_of
from headprune.model.open import Model
from headprune.schemas.records import Contender, ModelChoice
from headprune.surgery.edit import Edit, sketch, trying

ORIGINAL = "original"
Progress = Callable[[int, int], None]


class Selection:
    """Measures models beside the original, and ranks them.

    Args:
        model: The original.
        held_out: The text that they are measured on.
        seed: Seed of all draws.
        progress: Called with sequences done and sequences in all.
        goal: What may stay.
    """

    def __init__(
        self, model: Model, held_out: HeldOut, seed: int, progress: Progress, goal: SizeGoal
    ) -> None:
        self.model, self.held_out, self._goal = model, held_out, goal
        self._seed, self._progress = seed, progress
        self.contenders: list[Contender] = []
        self.failed: dict[str, str] = {}
        self._original = held_out.outputs(model.net, held_out.choose, progress)

    def measured(self, name: str, changed: Edit | Model, seconds: float) -> Contender:
        """Measure a candidate on the choosing half.

        Args:
            name: Name of the candidate.
            changed: An edit, which is tried in memory, or a model that was written.
            seconds: Time that it took.
        """
        with self._as(changed) as net:
            outputs = self.held_out.outputs(net, self.held_out.choose, self._progress)
        nearness, _ = self.held_out.nearness(outputs, self._original)
        if isinstance(changed, Edit):
            net, stored = sketch(self.model, changed), self.model.result_dtypes().default
        else:
            net, stored = changed.net, changed.result_dtypes().default
        return _contender(name, net, stored, chosen_by=nearness, seconds=seconds)

    def add(self, contender: Contender) -> bool:
        """Add a candidate; return whether it meets the goal and is the best so far."""
        missed = self._goal.missed(contender)
        if missed is not None:
            self.failed[contender.name] = missed
            return False
        self.contenders.append(contender)
        sign = -1 if self.held_out.measure.higher_is_better else 1
        self.contenders.sort(key=lambda one: sign * one.chosen_by)  # of equals, the first stays
        return self.contenders[0] is contender

    def conclude(self, best: Edit | Model) -> ModelChoice:
        """Measure the best contender on the other half of the text; return the record of all."""
        facts, wanted = [], None
        for changed in (self.model, best):
            with self._as(changed) as net:
                outputs = self.held_out.outputs(net, self.held_out.report, self._progress)
                copying = self.held_out.copying(net, self._seed)
            wanted = outputs if wanted is None else wanted
            whole, by_text = self.held_out.nearness(outputs, wanted)
            facts.append({"held_out": whole, "by_text": by_text, "copying_nll": copying})
        net, stored = self.model.net, self.model.result_dtypes().default
        chosen_by, _ = self.held_out.nearness(self._original, self._original)
        original = _contender(ORIGINAL, net, stored, chosen_by=chosen_by, seconds=0.0)
        first, *others = self.contenders
        return ModelChoice(
            goal=self._goal.said,
            measure=self.held_out.measure.name,
            higher_is_better=self.held_out.measure.higher_is_better,
            held_out_tokens=self.held_out.tokens,
            original=original.model_copy(update=facts[0]),
            contenders=(first.model_copy(update=facts[1]), *others),
            failed=self.failed,
        )

    @contextmanager
    def _as(self, changed: Edit | Model) -> Iterator[PreTrainedModel]:
        """Yield a model that computes as a candidate does."""
        if isinstance(changed, Edit):
            with trying(self.model.net, changed):
                yield self.model.net
        else:
            yield changed.net


def _contender(name: str, net: PreTrainedModel, stored: torch.dtype, **facts: Any) -> Contender:
    attentions, cached = attention_of(net), 0
    if task_of(net) in GENERATES:
        cached = kv_cache_elements_per_token(net) * stored.itemsize
    return Contender(
        name=name,
        parameters=net.num_parameters(),
        kv_cache_bytes_per_token=cached,
        query_heads=sum(a.query_heads for a in attentions),
        kv_heads=sum(a.kv_heads for a in attentions),
        **facts,
    )
