"""Choice of the model nearest to the original on held-out text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.compression.goals import SizeGoal
from headprune.compression.heldout import HeldOut
from headprune.context import Progress
from headprune.evaluation.task_table import Measure
from headprune.model.attention import attention_of
from headprune.model.cost import KVCache
from headprune.model.open import Model
from headprune.schemas.records import Contender, ModelChoice
from headprune.surgery.edit import Edit, meta_model, trying

ORIGINAL = "original"
_FAR_NAT = 0.1  # of perplexity
_WORD_LOST = 0.1  # of perplexity; with some 50 words, more would weigh their chance


class Selection:
    """Measures models beside the original, and ranks them.

    Args:
        model: The original.
        held_out: The text that they are measured on.
        progress: Called with sequences done and sequences in all.
        goal: What may stay.
    """

    def __init__(self, model: Model, held_out: HeldOut, progress: Progress, goal: SizeGoal) -> None:
        self.model, self.held_out, self._goal = model, held_out, goal
        self._progress = progress
        self.contenders: list[Contender] = []
        self.left_out: dict[str, str] = {}
        self._original = held_out.outputs(model.net, held_out.choose, progress)
        self._original_chosen_by, _ = held_out.nearness(self._original, self._original)
        self._words = held_out.words(model.net, held_out.choose, progress)
        self._far = held_out.far(held_out.choose)
        self._far_before = held_out.far_nats(model.net, self._far)

    def measured(self, name: str, changed: Edit | Model, seconds: float) -> Contender:
        """Measure a candidate on the choosing half.

        Args:
            name: Name of the candidate.
            changed: An edit, to try in memory, or a written model.
            seconds: Time that it took.
        """
        with self._as(changed) as net:
            outputs = self.held_out.outputs(net, self.held_out.choose, self._progress)
            words = self.held_out.kept(net, self._words)
            far = self.held_out.far_nats(net, self._far)
        nearness, _ = self.held_out.nearness(outputs, self._original)
        if isinstance(changed, Edit):
            net = meta_model(self.model, changed)
            stored = self.model.result_dtypes(self._goal.budget.out_dtype).default
        else:
            net, stored = changed.net, changed.result_dtypes().default
        facts = {"chosen_by": nearness, "passage_words": words, "seconds": seconds}
        facts["far_nats"] = _more(far, self._far_before)
        return self._contender(name, net, stored, **facts)

    def add(self, contender: Contender) -> bool:
        """Add a candidate; return whether it meets the goal and is the best so far."""
        missed = self._goal.missed(contender)
        if missed is not None:
            self.left_out[contender.name] = missed
            return False
        self.contenders.append(contender)
        # of equals, the first stays
        self.contenders.sort(key=lambda one: distance(one, self.held_out.measure))
        return self.contenders[0] is contender

    def loses_less_than(self, share: float) -> bool:
        """Return whether the best loses less of perplexity; words and far answers count as such."""
        if not self.contenders:
            return False
        best = distance(self.contenders[0], self.held_out.measure)
        return best < (1 + share) * self._original_chosen_by

    def conclude(self, best: Edit | Model) -> ModelChoice:
        """Measure the best contender on the other half of the text; return the record of all."""
        facts, wanted, report = [], None, self.held_out.report
        words = self.held_out.words(self.model.net, report, self._progress)
        questions, far_before = self.held_out.far(report), None
        for changed in (self.model, best):
            with self._as(changed) as net:
                outputs = self.held_out.outputs(net, report, self._progress)
                kept = self.held_out.kept(net, words)
                far = self.held_out.far_nats(net, questions)
            wanted = outputs if wanted is None else wanted
            far_before = far if far_before is None else far_before
            whole, by_text = self.held_out.nearness(outputs, wanted)
            facts.append({"held_out": whole, "by_text": by_text, "held_out_words": kept})
            facts[-1]["held_out_far_nats"] = _more(far, far_before)
        net, stored = self.model.net, self.model.result_dtypes().default
        first_facts = {
            "chosen_by": self._original_chosen_by,
            "passage_words": 1.0 if self._words else None,
            "far_nats": 0.0 if self._far else None,
        }
        original = self._contender(ORIGINAL, net, stored, **first_facts, seconds=0.0)
        first, *others = self.contenders
        return ModelChoice(
            goal=self._goal.said,
            measure=self.held_out.measure.name,
            higher_is_better=self.held_out.measure.higher_is_better,
            held_out_tokens=self.held_out.tokens,
            passage_words=(len(self._words), len(words)),
            kv_cache_tokens=self._goal.context,
            original=original.model_copy(update=facts[0]),
            contenders=(first.model_copy(update=facts[1]), *others),
            left_out=self.left_out,
        )

    def _contender(
        self, name: str, net: PreTrainedModel, stored: torch.dtype, **facts: Any
    ) -> Contender:
        attentions = attention_of(net)
        return Contender(
            name=name,
            parameters=net.num_parameters(),
            kv_cache_bytes=KVCache.of(net).elements(self._goal.context) * stored.itemsize,
            query_heads=sum(a.query_heads for a in attentions),
            kv_heads=sum(a.kv_heads for a in attentions),
            **facts,
        )

    @contextmanager
    def _as(self, changed: Edit | Model) -> Iterator[PreTrainedModel]:
        """Yield a model that computes as a candidate does."""
        if isinstance(changed, Edit):
            with trying(self.model.net, changed):
                yield self.model.net
        else:
            yield changed.net


def distance(one: Contender, measure: Measure[Any]) -> float:
    """Distance to the original: a tenth of the passage words lost is 1 % of perplexity.

    So is a tenth of a nat in answers that lie far back.
    """
    if measure.higher_is_better:
        return -one.chosen_by
    lost = 0.0 if one.passage_words is None else 1 - one.passage_words
    return one.chosen_by * (1 + _WORD_LOST * lost + _FAR_NAT * max(0.0, one.far_nats or 0.0))


def _more(nats: float | None, before: float | None) -> float | None:
    return None if nats is None or before is None else nats - before
