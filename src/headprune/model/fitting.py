"""Gates and scores, fitted to the model that they are used on."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from headprune.model.attention import attention_of
from headprune.model.units import modules_of
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.gates import TrainedGates, read_gates
from headprune.schemas.plan import ModelIdentity
from headprune.schemas.scores import Scores


def fitted_gates(
    net: PreTrainedModel, source: ModelIdentity, folder: Path
) -> tuple[TrainedGates, list[Attention]]:
    """Read the gates of a model, and return them with their modules.

    Raises:
        CheckpointError: If the folder holds no finished gates.
        PlanError: If they do not fit the model.
    """
    trained = read_gates(folder, source)
    return trained, modules_of(attention_of(net), trained.metadata.modules, "gates")


def fitted_scores(net: PreTrainedModel, scores: Scores) -> list[Attention]:
    """Return the modules of scores.

    Raises:
        PlanError: If they do not fit the model.
    """
    return modules_of(attention_of(net), scores.metadata.modules, "scores")
