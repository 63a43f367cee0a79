"""The model once more, on the text that scores came from: what rounds look at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from headprune.config import DataConfig, PlanConfig, ScoreConfig
from headprune.data.calibration import calibration
from headprune.declaration import Context
from headprune.errors import PlanError
from headprune.evidence.criteria import CRITERIA
from headprune.evidence.score import gather, scores_of
from headprune.model.attention import attention_of
from headprune.model.gating import open_elsewhere
from headprune.model.heads import keeping_outputs
from headprune.model.units import unit_gates
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.scores import Scores
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
        metadata, remote = scores.metadata, context.allowed.trust_remote_code
        assert metadata.data is not None
        self.examples = calibration(net, model, metadata.data, metadata.calibration, "plan", remote)

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
