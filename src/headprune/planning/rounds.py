"""The model once more, on the text that scores came from: what rounds and exchanges look at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from headprune.config import DataConfig, PlanConfig, ScoreConfig
from headprune.data.calibration import calibration
from headprune.data.samples import CalibrationSample
from headprune.declaration import Context
from headprune.errors import PlanError
from headprune.evidence.criteria import CRITERIA
from headprune.evidence.score import gather, scores_of
from headprune.model.attention import attention_of
from headprune.model.gating import open_elsewhere
from headprune.model.heads import keeping_outputs
from headprune.model.residency import residency_of
from headprune.model.units import unit_gates
from headprune.planning.constraints import Constraints
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.scores import Scores, ScoresMetadata
from headprune.surgery.refit import refit as refit_outputs


def refuse_rounds(criterion: str, data: DataConfig | None) -> None:
    """Refuses rounds by a criterion that does not look at data again in each of them.

    Raises:
        PlanError: If it does not.
    """
    if data is None or "gates" in CRITERIA[criterion].needs:
        raise PlanError(
            f"--rounds: the criterion {criterion} does not look at the model again. Leave out "
            "--rounds, or use one that does, such as fisher or reconstruction."
        )


def refuse_exchanges(config: PlanConfig, scores: ScoresMetadata) -> None:
    """Refuses exchanges where there is no text to measure them on, or nothing to exchange.

    Raises:
        PlanError: If the scores came from none, or every layer keeps an equal share.
    """
    if scores.data is None:
        raise PlanError(
            "--exchanges measures on the text that the scores came from, and these came from none. "
            "Leave out --exchanges, or score by a criterion that reads --data."
        )
    if not scores.refits:
        raise PlanError(
            "--exchanges refits W_O to the text that the scores came from, which is too short for "
            "that, or the model runs one W_O in several layers. Leave out --exchanges, or score on "
            "more text."
        )
    if config.per_layer:
        raise PlanError(
            "--exchanges moves heads from layer to layer, and --per-layer leaves every layer an "
            "equal share. Leave out one of the two."
        )


def why_no_exchanges(net: PreTrainedModel, constraints: Constraints) -> str | None:
    """Why layers cannot exchange single units; None if they can."""
    if residency_of(net) is not None:
        return (
            "runs the model dozens of times, and layer by layer (--placement layers) it would be "
            "read as often"
        )
    if constraints.even or constraints.tensor_parallel > 1:
        return (
            "moves single heads from layer to layer, which --tensor-parallel and engines with the "
            "same heads in every layer (--for) leave no room for"
        )
    return None


def refuse_exchanges_of(net: PreTrainedModel, constraints: Constraints) -> None:
    """Refuses exchanges where single units cannot move, and of models read anew for every pass.

    Raises:
        PlanError: If it does.
    """
    why = why_no_exchanges(net, constraints)
    if why is not None:
        raise PlanError(f"--exchanges {why}. Leave out one of the two.")


def text_of(
    net: PreTrainedModel, model: str | Path, scores: Scores, context: Context
) -> CalibrationSample:
    """The text that scores came from, as it was taken for them."""
    metadata, remote = scores.metadata, context.allowed.trust_remote_code
    assert metadata.data is not None
    return calibration(net, model, metadata.data, metadata.calibration, "plan", remote)


class ScoredAgain:
    """Scores a model once more, as it is without the units that have gone.

    Raises:
        PlanError: If the criterion does not look at what the model computes.
    """

    def __init__(
        self,
        net: PreTrainedModel,
        model: str | Path,
        scores: Scores,
        attentions: Sequence[Attention],
        config: PlanConfig,
        context: Context,
    ) -> None:
        self.everything = attention_of(net)
        self.net, self.attentions, self.context = net, attentions, context
        self.criterion, _ = scores.of(config.criterion)
        self.refit, self.unit = config.refit, scores.metadata.unit
        self.back = keeping_outputs(net, self.everything)
        refuse_rounds(self.criterion, scores.metadata.data)
        self.scoring = scores.metadata.calibration.part(
            ScoreConfig, criterion=(self.criterion,), unit=self.unit
        )
        self.examples = text_of(net, model, scores, context)

    def scores(self, kept: set[int]) -> Tensor:
        """Scores of all units, with those that are not in ``kept`` closed."""
        gates = unit_gates(self.attentions, self.unit, kept)
        if self.refit:  # always from the original: the first stream must be that
            every = open_elsewhere(self.everything, self.attentions, gates)
            self.back()
            refit_outputs(
                self.net, self.everything, every, self.examples.whole(), self.context.step
            )
        evidence = gather(
            self.net, self.attentions, self.scoring, self.examples, gates, self.context
        )
        return scores_of(self.criterion, evidence, self.attentions, self.unit)
