"""Which of several models comes nearest to the original on held-out text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headprune.compression.heldout import HeldOut
from headprune.config import Dtype
from headprune.model.attention import attention_of
from headprune.model.cost import GENERATES, kv_cache_elements_per_token
from headprune.model.loading import task_of
from headprune.model.opening import load
from headprune.model.stored import stored_dtypes, stored_tensors
from headprune.schemas.records import Contender, ModelChoice

ORIGINAL = "original"
Progress = Callable[[int, int], None]


class Selection:
    """Measures models beside the original, and ranks them.

    Args:
        held_out: The text that they are measured on.
        dtype: Element type that they compute in.
        seed: Seed of what is random.
        progress: Called with sequences done and sequences in all.
    """

    def __init__(self, held_out: HeldOut, dtype: Dtype, seed: int, progress: Progress) -> None:
        self.held_out, self.measure = held_out, held_out.measure
        self._dtype, self._seed, self._progress = dtype, seed, progress
        self.contenders: list[Contender] = []
        self.failed: dict[str, str] = {}

    def begin(self, net: PreTrainedModel, place: str | Path) -> None:
        """Measures the original, which all others are compared with."""
        self._outputs = self.held_out.outputs(net, self._progress)
        self.original = self._measured(ORIGINAL, net, place, 0.0)

    def add(self, name: str, folder: Path, seconds: float, loading: Mapping[str, Any]) -> bool:
        """Measures a model, and says whether it is better than all before.

        Args:
            name: What it is.
            folder: Where it lies.
            seconds: How long it took to make.
            loading: What it may bring.
        """
        net, _ = load(
            folder,
            self._dtype,
            loading.get("trust_remote_code", False),
            loading.get("assume_supported", False),
        )
        found = self._measured(name, net, folder, seconds)
        self.contenders.append(found)
        self.contenders.sort(key=self._cost)  # of equals, the first stays before the others
        return self.contenders[0] is found

    def concluded(self, goal: str) -> ModelChoice:
        """The record of it."""
        return ModelChoice(
            goal=goal,
            measure=self.measure.name,
            higher_is_better=self.measure.higher_is_better,
            held_out_tokens=self.held_out.tokens,
            original=self.original,
            contenders=tuple(self.contenders),
            failed=self.failed,
        )

    def _cost(self, contender: Contender) -> tuple[float, float]:
        cost = -contender.held_out if self.measure.higher_is_better else contender.held_out
        return cost, contender.copying_nll or 0.0

    def _measured(
        self, name: str, net: PreTrainedModel, place: str | Path, seconds: float
    ) -> Contender:
        outputs = self._outputs
        if name != ORIGINAL:
            outputs = self.held_out.outputs(net, self._progress)
        together, each = self.held_out.compared(outputs, self._outputs)
        attentions, cached = attention_of(net), 0
        if task_of(net) in GENERATES:
            stored = stored_dtypes(net, stored_tensors(place)).default
            cached = kv_cache_elements_per_token(net) * stored.itemsize
        return Contender(
            name=name,
            held_out=together,
            by_text=each,
            copying_nll=self.held_out.copying(net, self._seed),
            parameters=net.num_parameters(),
            kv_cache_bytes_per_token=cached,
            query_heads=sum(a.query_heads for a in attentions),
            kv_heads=sum(a.kv_heads for a in attentions),
            seconds=seconds,
        )
