"""Layers exchange units: what each gains by one back, and loses by one more, is measured.

Scores compare the units of a layer well, and those of different layers by what is easy to see: what
a layer's output loses, or how the loss bends. Here the model runs as it would be after the cut, W_O
refitted, and then with one unit more or less in one layer, that layer refitted; the distance of its
outputs from the original's says what the unit is worth there. The plan is chosen again by these
numbers, within the same budgets, and taken if the model it makes is nearer to the original.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from transformers import PreTrainedModel

from headprune.config import JUDGED_TOKENS
from headprune.data.rows import evenly
from headprune.data.samples import CalibrationSample
from headprune.errors import DataError
from headprune.evidence.distance import distance, distance_name, outputs, weight_of
from headprune.model.attention import attention_of
from headprune.model.batch import Batch
from headprune.model.gating import apply_gate, fixed, gated, open_elsewhere
from headprune.model.heads import keeping_outputs, read_output, write_output
from headprune.model.placement import input_device
from headprune.model.replay import Replay
from headprune.model.units import unit_gates
from headprune.planning.choice import HeadChoice
from headprune.runtime.modeling_headprune import Attention
from headprune.surgery.refit import fit_output, refit
from headprune.tensors.units import Unit, members

_BEYOND = 4.0  # times the largest number measured: what is not at stake stays where it is
_IN_ORDER = 1e-6  # of it: keeps the order within a layer where two numbers are the same

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Exchange:
    """One round of exchanges.

    Attributes:
        returned: Units that came back; others went for them.
        measure: What the distance is.
        before: Distance of the outputs of the cut and refitted model from the original's before.
        after: The same afterwards; not below ``before`` where the round was not taken.
    """

    returned: int
    measure: str
    before: float
    after: float

    @property
    def taken(self) -> bool:
        """Whether the plan was changed by it."""
        return self.after < self.before


@dataclass(frozen=True)
class _Trial:
    """A module with one unit more or less.

    Attributes:
        unit: The unit, by its number in the model.
        gate: Its gates, shape (query heads,).
        heads: Its refitted W_O, beside the model; None for as it is, where no head is left.
        bias: The bias with it.
    """

    unit: int
    gate: Tensor
    heads: Tensor | None = None
    bias: Tensor | None = None


def told(exchanges: Sequence[Exchange], unit: Unit) -> list[str]:
    """What exchanges did, a line each."""
    if not exchanges:
        return ["No exchange between layers is worth it within the budgets."]
    return [
        f"Exchange {number}: {one.returned} x {unit.value} back for others, {one.measure} "
        f"{one.before:.4g} -> {one.after:.4g}{'' if one.taken else '; not taken'}."
        for number, one in enumerate(exchanges, start=1)
    ]


class Exchanges:
    """Exchanges units between layers.

    Args:
        net: The model, whole; its W_O change while this works, and are as before afterwards.
        choice: How units are chosen.
        values: Scores of all units, by which they go within a layer.
        examples: Text to refit on; distances are measured on a part of it.
        progress: Called with passes done and passes in all.
    """

    def __init__(
        self,
        net: PreTrainedModel,
        choice: HeadChoice,
        values: Tensor,
        examples: CalibrationSample,
        progress: Progress = lambda done, total: None,
    ) -> None:
        self.net, self.choice, self.values = net, choice, values
        self._everything, self._progress = attention_of(net), progress
        self._whole = keeping_outputs(net, self._everything)
        self._text = examples.whole()
        self._replay = Replay(net, self._everything)
        units_of = [members(choice.unit, a.group_sizes) for a in choice.attentions]
        self._module_of = [at for at, units in enumerate(units_of) for _ in units]  # by unit
        self._all = set(range(len(self._module_of)))
        self._judged = _part(examples).batches()
        self._weights = [weight_of(net, batch) for batch in self._judged]
        whole = self._gates(self._all)
        # beside the model: of a large vocabulary, they are as large as small models
        self._wanted = [send_to_device(self._outputs(whole, b), "cpu") for b in self._judged]

    def run(self, kept: set[int], rounds: int) -> tuple[set[int], list[Exchange]]:
        """Exchanges until nothing is gained by it, or so often.

        Args:
            kept: Units that stay, by number.
            rounds: How often, at most.

        Returns:
            The units that stay then, of as many query heads, and what every round did.

        Raises:
            DataError: If there is too little text, or the outputs are not finite.
            PlanError: If a module runs more than once.
        """
        done, measure = list[Exchange](), distance_name(self.net)
        heads = sum(int(gate.sum()) for gate in self._gates(kept))
        try:
            trials = self._cut(kept)
            before = self._distance(self._gates(kept))
            for number in range(rounds):
                worth = self._measured(kept, trials, before)
                new = self.choice.of(self._ranked(kept, worth), self._all, heads)
                if new == kept:
                    break
                trials = self._cut(new, with_trials=number < rounds - 1)
                after = self._distance(self._gates(new))
                done.append(Exchange(len(new - kept), measure, before, after))
                if not done[-1].taken:
                    break
                kept, before = new, after
        finally:
            self._whole()
        return kept, done

    def _cut(self, kept: set[int], with_trials: bool = True) -> dict[str, list[_Trial]]:
        """Refits the model to what stays, and if asked every module to one unit more and less."""
        self._whole()
        at_stake = self._at_stake(kept)
        number_of = {a.path: at for at, a in enumerate(self.choice.attentions)}
        trials: dict[str, list[_Trial]] = {}

        def fit_trials(attention: Attention, states: Tensor, wanted: Tensor) -> None:
            at = number_of.get(attention.path)
            if at is None or not with_trials:
                return
            for unit in at_stake[at]:
                trial = _Trial(unit, self._gates(kept ^ {unit})[at])
                if bool(trial.gate.any()):
                    opened = apply_gate(states, trial.gate[None])
                    fitted = fit_output(attention, trial.gate, opened, wanted, self._text)
                    trial = replace(trial, heads=fitted.heads.cpu(), bias=fitted.bias)
                trials.setdefault(attention.path, []).append(trial)

        gates = open_elsewhere(self._everything, self.choice.attentions, self._gates(kept))
        refit(self.net, self._everything, gates, self._text, self._progress, fit_trials)
        return trials

    def _measured(
        self, kept: set[int], trials: Mapping[str, Sequence[_Trial]], before: float
    ) -> dict[int, float]:
        """What every unit at stake is worth: how much farther away the model is without it."""
        units = [trial.unit for some in trials.values() for trial in some]
        found = {unit: list[float]() for unit in units}
        done = 0
        gates = self._gates(kept)
        for batch, wanted in self._judging():
            with self._replay.recording():
                self._outputs(gates, batch)
            for at, attention in enumerate(self.choice.attentions):
                for trial in trials.get(attention.path, ()):
                    changed = [*gates[:at], trial.gate, *gates[at + 1 :]]
                    with self._replay.from_block_of(attention), _trying(attention, trial):
                        made = self._outputs(changed, batch)
                    found[trial.unit].append(float(distance(made, wanted, batch)))
                    done += 1
                    self._progress(done, len(units) * len(self._judged))
        nearer = {unit: before - self._mean(each) for unit, each in found.items()}
        return {unit: -by if unit in kept else by for unit, by in nearer.items()}

    def _at_stake(self, kept: set[int]) -> list[list[int]]:
        """Per module, the unit that was the last to go, and the one that would be the next."""
        found = []
        for at in range(len(self.choice.attentions)):
            own = [unit for unit, module in enumerate(self._module_of) if module == at]
            gone = [unit for unit in own if unit not in kept]
            staying = [unit for unit in own if unit in kept and unit not in self.choice.held]
            last = max(gone, key=self._value, default=None)
            following = min(staying, key=self._value, default=None)
            found.append([unit for unit in (last, following) if unit is not None])
        return found

    def _value(self, unit: int) -> float:
        return float(self.values[unit])

    def _ranked(self, kept: set[int], worth: Mapping[int, float]) -> Tensor:
        """Scores of all units by what was measured; those not at stake stay, or stay away."""
        beyond = _BEYOND * (max(map(abs, worth.values()), default=0.0) or 1.0)
        scores = torch.full((len(self._all),), -beyond, dtype=torch.float64)
        scores[sorted(kept)] = beyond
        for unit, value in worth.items():
            scores[unit] = value
        for pair in self._at_stake(kept):
            if len(pair) == 2 and scores[pair[0]] >= scores[pair[1]]:  # no exchange within a layer
                mean = float(scores[pair].mean())
                scores[pair[0]], scores[pair[1]] = mean - _IN_ORDER * beyond, mean
        return scores

    def _distance(self, gates: Sequence[Tensor]) -> float:
        return self._mean(
            [float(distance(self._outputs(gates, b), wanted, b)) for b, wanted in self._judging()]
        )

    def _judging(self) -> Iterator[tuple[Batch, Any]]:
        """What distances are measured on, and what the whole model makes of it."""
        device = input_device(self.net)
        for batch, wanted in zip(self._judged, self._wanted, strict=True):
            yield batch, send_to_device(wanted, device)

    def _mean(self, distances: Sequence[float]) -> float:
        """The distance of all batches, of which every output counts alike."""
        pairs = zip(self._weights, distances, strict=True)
        mean = sum(weight * each for weight, each in pairs) / sum(self._weights)
        if not math.isfinite(mean):
            raise DataError(
                "What the cut model makes of the text that exchanges are measured on is not "
                "finite. Try --dtype float32, or leave out --exchanges."
            )
        return mean

    @torch.no_grad()
    def _outputs(self, gates: Sequence[Tensor], batch: Batch) -> Any:
        with gated(self.choice.attentions, fixed(gates)):
            return outputs(self.net, batch)

    def _gates(self, kept: set[int]) -> list[Tensor]:
        return unit_gates(self.choice.attentions, self.choice.unit, kept)


@contextmanager
def _trying(attention: Attention, trial: _Trial) -> Iterator[None]:
    """Gives a module the W_O of a trial, for the time of a ``with`` block."""
    own = read_output(attention)
    if trial.heads is not None:
        write_output(attention, trial.heads, trial.bias)
    try:
        yield
    finally:
        write_output(attention, *own)


def _part(examples: CalibrationSample) -> CalibrationSample:
    """Sequences from all over a sample, on which distances are measured."""
    mean = examples.tokens / max(len(examples.rows), 1)
    count = min(len(examples.rows), max(2, round(JUDGED_TOKENS / max(mean, 1.0))))
    return replace(
        examples, rows=examples.rows.select(evenly(len(examples.rows), count)), left=None
    )
