"""The candidates, one row each: ways to meet a goal, of which the best is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from headprune import devices
from headprune.compression.goals import SizeGoal
from headprune.config import (
    CalibrationConfig,
    CompressConfig,
    ConvertConfig,
    DataConfig,
    PlanConfig,
    ScoreConfig,
    Writing,
)
from headprune.context import Context
from headprune.errors import DataError, PlanError, ProofError
from headprune.evidence.score import score
from headprune.exporting.convert_gqa import convert_gqa
from headprune.exporting.prune import prune
from headprune.exporting.publish import Pruned
from headprune.planning.from_evidence import CutRequest
from headprune.planning.plan import plan
from headprune.tensors.units import Unit

Made = TypeVar("Made")

SCORED = 512  # tokens of a sequence at most: gradients are means over sequences, and want many


@dataclass(frozen=True)
class Job:
    """What every candidate is made of.

    Attributes:
        model: Folder or hub id.
        goal: What may stay.
        text: The text that heads are scored, refitted and merged on.
        config: How.
        work: Where scores and candidates are made.
        context: What it runs in.
    """

    model: str
    goal: SizeGoal
    text: DataConfig
    config: CompressConfig
    work: Path
    context: Context

    def scores(self, unit: Unit, criterion: str) -> Path:
        """The scores of a kind of units, made once, by all criteria that candidates ask for.

        Where they cannot be made together, they are made by this criterion alone, which may do
        without what another needs.
        """
        together, criteria = self.work / f"scores-{unit.value}", criteria_of(self.goal, unit)
        alone = self.work / f"scores-{unit.value}-{criterion}"
        for made in (together, alone):
            if made.is_dir():
                return made
        try:
            self._score(together, unit, criteria)
        except Exception as error:  # memory runs out in several kinds; others go on
            if len(criteria) == 1 or not is_its_own(error):
                raise
            self._score(alone, unit, (criterion,))
            return alone
        return together

    def _score(self, folder: Path, unit: Unit, criteria: Sequence[str]) -> None:
        length = min(self.config.seq_len, SCORED)
        config = self.config.part(ScoreConfig, criterion=criteria, unit=unit, seq_len=length)
        score(self.model, folder, config, self.text, context=self.context)


def is_its_own(error: Exception) -> bool:
    """Whether what cannot be made fails alone: others may take less memory, or need less."""
    own = isinstance(error, PlanError | DataError | ProofError)
    return own or devices.out_of_memory(error)


def _filled(make: Callable[[int], Made]) -> Made:
    """Leave every layer a head if the goal allows it: torchao and quanto load no empty weights."""
    try:
        return make(1)
    except PlanError:
        return make(0)


class Maker(Protocol):
    """How a candidate is made."""

    def applies(self, goal: SizeGoal) -> bool:
        """Whether it can meet a goal."""

    def make(self, job: Job, folder: Path, context: Context) -> Pruned:
        """Makes it: a folder, verified."""


@dataclass(frozen=True)
class RemoveHeads:
    """Heads are removed.

    Attributes:
        unit: What is removed as one piece.
        criterion: What chooses.
        refit: Whether W_O makes up for it.
    """

    unit: Unit
    criterion: str
    refit: bool

    def applies(self, goal: SizeGoal) -> bool:
        """Where it removes what the goal counts."""
        return self.unit in goal.units

    def make(self, job: Job, folder: Path, context: Context) -> Pruned:
        """Plans and cuts."""
        scores = job.scores(self.unit, self.criterion)
        context.stage("planning")
        config = job.goal.budget.part(PlanConfig, criterion=self.criterion)
        made = _filled(
            lambda least: plan(
                job.model, scores, config.part(PlanConfig, min_per_layer=least), context=context
            )
        )
        return prune(
            job.model,
            folder,
            CutRequest(plan=made.plan),
            job.text if self.refit else None,
            job.config.part(CalibrationConfig),
            Writing(out_dtype=job.config.out_dtype),
            context,
        )


@dataclass(frozen=True)
class ShareKvHeads:
    """KV heads are merged or removed, in every layer as costs least."""

    def applies(self, goal: SizeGoal) -> bool:
        """Where fewer KV heads meet the goal."""
        return goal.kv_share is not None

    def make(self, job: Job, folder: Path, context: Context) -> Pruned:
        """Converts."""
        config = job.config.part(ConvertConfig, kv_budget=job.goal.kv_share)
        return _filled(
            lambda least: (
                convert_gqa(
                    job.model, folder, config, job.text, empty_layers=not least, context=context
                ).pruned
            )
        )


@dataclass(frozen=True)
class Candidate:
    """A row of the table.

    Attributes:
        name: What it is called.
        way: How it is made.
    """

    name: str
    way: Maker


def _removing(unit: Unit, name: str) -> tuple[Candidate, ...]:
    return (
        Candidate(f"{name}, compensated, refit", RemoveHeads(unit, "compensated", refit=True)),
        Candidate(f"{name}, fisher, refit", RemoveHeads(unit, "fisher", refit=True)),
        Candidate(f"{name}, fisher", RemoveHeads(unit, "fisher", refit=False)),
    )


CANDIDATES = (
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
