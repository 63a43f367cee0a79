"""Gates and scores, fitted to the model that they are used on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from headprune.errors import PlanError
from headprune.model.attention import attention_of
from headprune.model.units import modules_of
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.gates import TrainedGates, read_gates
from headprune.schemas.plan import ModelIdentity
from headprune.schemas.scores import Scores


def fitted_gates(
    net: PreTrainedModel, source: ModelIdentity, folder: Path
) -> tuple[TrainedGates, list[Attention]]:
    """Reads the gates of a model, and finds the modules that they are of.

    Args:
        net: The model.
        source: Who it is.
        folder: The gates folder.

    Raises:
        CheckpointError: If the folder holds no finished gates.
        PlanError: If they do not fit the model.
    """
    trained = read_gates(folder, source)
    metadata = trained.metadata
    count = [trained.kept.numel()]
    attentions = modules_of(attention_of(net), metadata.modules, metadata.unit, count, "gates")
    _refuse_other_heads(trained, attentions)
    _refuse_other_weights(net, trained.weights or {})
    return trained, attentions


def fitted_scores(net: PreTrainedModel, scores: Scores) -> list[Attention]:
    """Finds the modules that scores are of.

    Raises:
        PlanError: If they do not fit the model.
    """
    metadata = scores.metadata
    attentions = modules_of(
        attention_of(net), metadata.modules, metadata.unit, metadata.units, "scores"
    )
    heads = sum(attention.query_heads for attention in attentions)
    if metadata.query_heads != heads:
        raise PlanError(
            f"The scores are of {metadata.query_heads} query heads, and the model has {heads} in "
            "these modules: their file is damaged. Get it again."
        )
    return attentions


def _refuse_other_heads(trained: TrainedGates, attentions: Sequence[Attention]) -> None:
    metadata = trained.metadata
    for attention, ids, groups in zip(
        attentions, metadata.heads, metadata.group_sizes, strict=True
    ):
        if (ids, groups) != (attention.query_ids, attention.group_sizes):
            raise PlanError(
                f"The gates are of heads {_listed(ids)} of '{attention.path}' in groups of "
                f"{_listed(groups)}; the model has {_listed(attention.query_ids)} there, in groups "
                f"of {_listed(attention.group_sizes)}. Give the model they were trained on."
            )


def _refuse_other_weights(net: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    parameters = dict(net.named_parameters())
    for name, value in weights.items():
        there = list(parameters[name].shape) if name in parameters else "none"
        if there != list(value.shape):
            raise PlanError(
                f"The gates come with a trained weight '{name}' of shape {list(value.shape)}; the "
                f"model has {there} of that name. Give the model they were trained on."
            )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
