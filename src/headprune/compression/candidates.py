"""The candidates, one row each: ways to meet a goal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from headprune import devices
from headprune.compression.goals import SizeGoal
from headprune.config import (
    CalibrationConfig,
    CompressConfig,
    ConvertConfig,
    DataConfig,
    LayoutOption,
    ScoreConfig,
    SwaConfig,
    Writing,
)
from headprune.config.stages import WindowConfig
from headprune.context import Context
from headprune.errors import DataError, PlanError, ProofError
from headprune.evidence.score import scores_on
from headprune.model.open import Model
from headprune.planning.choose import CutRequest, choose
from headprune.result.convert_gqa import merged_of
from headprune.result.convert_swa import propose_windows
from headprune.result.prune import propose_removal
from headprune.result.write import Changes, Proposal
from headprune.schemas.scores import Scores
from headprune.tensors.units import Unit

Made = TypeVar("Made")

SCORED = 512  # tokens of a sequence at most: gradients are means over sequences, and want many


@dataclass(frozen=True)
class Job:
    """The input of every candidate.

    Attributes:
        model: The model.
        goal: The size to reach.
        text: Text to score, refit and merge on.
        config: Settings.
        context: Progress.
        scored: Scores by unit and criterion, as they become known.
        curvature: Curvature of the loss by module path, once scores have measured it.
    """

    model: Model
    goal: SizeGoal
    text: DataConfig
    config: CompressConfig
    context: Context
    scored: dict[tuple[Unit, str], Scores] = field(default_factory=dict)
    curvature: dict[str, Tensor] = field(default_factory=dict)

    def scores(self, unit: Unit, criterion: str) -> Scores:
        """Return scores of a kind of units, computed once for all criteria of the candidates.

        Where they cannot be computed together, this criterion is computed alone: it may need less.
        """
        if (unit, criterion) not in self.scored:
            criteria = criteria_of(self.goal, unit)
            try:
                scores = self._score(unit, criteria)
            except Exception as error:  # memory runs out in several kinds; others are raised
                if len(criteria) == 1 or not is_recoverable(error):
                    raise
                criteria = (criterion,)
                scores = self._score(unit, criteria)
            self.scored.update({(unit, name): scores for name in criteria})
        return self.scored[unit, criterion]

    def _score(self, unit: Unit, criteria: Sequence[str]) -> Scores:
        length = min(self.config.seq_len, SCORED)
        config = self.config.part(ScoreConfig, criterion=criteria, unit=unit, seq_len=length)
        scores, statistics = scores_on(self.model, config, self.text, context=self.context)
        for part in statistics:
            if "curvature" in part.collected:
                self.curvature[part.path] = part.curvature
        return scores


def is_recoverable(error: Exception) -> bool:
    """Return whether others may succeed: they may take less memory, or need less."""
    own = isinstance(error, PlanError | DataError | ProofError)
    return own or devices.out_of_memory(error)


def _filled(make: Callable[[bool], Made]) -> Made:
    """Leave every layer a head if the goal allows it: torchao and quanto load no empty weights."""
    try:
        return make(False)
    except PlanError:
        return make(True)


@dataclass(frozen=True)
class RemoveHeads:
    """Heads are removed.

    Attributes:
        unit: Unit of removal.
        criterion: Criterion of the choice.
        refit: Whether W_O makes up for it.
    """

    unit: Unit
    criterion: str
    refit: bool

    def applies(self, goal: SizeGoal) -> bool:
        """Return whether the goal counts this unit."""
        return self.unit in goal.units

    def make(self, job: Job, context: Context) -> Proposal:
        """Plan and refit."""
        scores = job.scores(self.unit, self.criterion)
        context.stage("planning")
        request = job.goal.budget.part(CutRequest, criterion=self.criterion, scores=scores)
        chosen = _filled(lambda empty: choose(job.model, request, empty_layers=empty))
        return propose_removal(
            job.model,
            chosen,
            job.text if self.refit else None,
            job.config.part(CalibrationConfig),
            Writing(out_dtype=job.config.out_dtype),
            context,
            reports=False,  # held-out text that chose nothing judges the best candidate
        )


@dataclass(frozen=True)
class ShareKvHeads:
    """KV heads are merged or removed, in every layer as costs least."""

    def applies(self, goal: SizeGoal) -> bool:
        """Return whether fewer KV heads meet the goal."""
        return goal.kv_share is not None

    def make(self, job: Job, context: Context) -> Proposal:
        """Merge."""
        config = job.config.part(ConvertConfig, kv_budget=job.goal.kv_share)
        layout = LayoutOption.PER_LAYER
        merged = _filled(
            lambda empty: merged_of(
                job.model, config, job.text, layout, context, empty, job.curvature
            )
        )
        return Proposal(merged.edit, Changes(merged.record))


@dataclass(frozen=True)
class GiveWindows:
    """KV heads see a window; whole layers do, for engines that hold no other windows."""

    def applies(self, goal: SizeGoal) -> bool:
        """Return whether a window meets the goal."""
        return goal.window is not None

    def make(self, job: Job, context: Context) -> Proposal:
        """Score and plan."""
        assert job.goal.window is not None
        tokens = min(job.config.calibration_tokens, WindowConfig().calibration_tokens)
        config = job.config.part(
            SwaConfig, window=job.goal.window.size, seq_len=None, calibration_tokens=tokens
        )
        return propose_windows(job.model, config, job.text, None, context)


@dataclass(frozen=True)
class Candidate:
    """A row of the table.

    Attributes:
        name: Its name.
        way: Its maker.
        fallback: It is made only where the one before failed, or its refit was left out.
        ends_search_below: Loss, as a share of perplexity, below which no later one is made.
    """

    name: str
    way: RemoveHeads | ShareKvHeads | GiveWindows
    fallback: bool = False
    ends_search_below: float | None = None

    @property
    def outline(self) -> str:
        """Its name, and whether it can be the only one."""
        if self.ends_search_below is None:
            return self.name
        return (
            f"{self.name}; if they lose less than {100 * self.ends_search_below:.0f} %, no others"
        )


def _removing(unit: Unit, name: str) -> tuple[Candidate, ...]:
    return (
        Candidate(f"{name}, compensated, refit", RemoveHeads(unit, "compensated", refit=True)),
        Candidate(f"{name}, fisher", RemoveHeads(unit, "fisher", refit=False), fallback=True),
    )


CANDIDATES = (
    # a quarter of the cache of SmolLM2 at 8,192 tokens costs 5 %, by the others 240 and 430 %
    Candidate("windows", GiveWindows(), ends_search_below=0.05),
    *_removing(Unit.KV_GROUP, "KV groups"),
    *_removing(Unit.HEAD, "heads"),
    Candidate("KV heads merged or removed, by layer", ShareKvHeads()),
)


def candidates_for(goal: SizeGoal) -> tuple[Candidate, ...]:
    """The candidates that can meet a goal, in the order of the table."""
    return tuple(each for each in CANDIDATES if each.way.applies(goal))


def criteria_of(goal: SizeGoal, unit: Unit) -> tuple[str, ...]:
    """The criteria that the candidates for a goal ask for."""
    ways = [candidate.way for candidate in candidates_for(goal)]
    asked = (way.criterion for way in ways if isinstance(way, RemoveHeads) and way.unit is unit)
    return tuple(dict.fromkeys(asked))
