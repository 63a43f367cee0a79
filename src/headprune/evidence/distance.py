"""How far the outputs of a cut model are from the original's, by which cuts are judged."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from headprune.evidence.losses import embedding
from headprune.model.batch import Batch
from headprune.model.forward import run_model
from headprune.model.loading import task_of
from headprune.training.divergence import divergence

_DISTANCES = {
    "logits": "divergence (nats per token) from the original",
    "features": "1 - cosine to the embeddings of the original",
}


def distance_name(model: PreTrainedModel) -> str:
    """What ``distance`` is for a model, in words."""
    return _DISTANCES["features" if task_of(model) == "features" else "logits"]


def outputs(model: PreTrainedModel, batch: Batch) -> Any:
    """What a model is judged by: what its head gives, or embeddings where it has none."""
    if task_of(model) == "features":
        return embedding(model, batch)
    return run_model(model, batch, head=True)


def distance(got: Any, wanted: Any, batch: Batch) -> Tensor:
    """How far ``outputs`` are from the original's: nats per token, or 1 - cosine of embeddings."""
    if isinstance(got, Tensor):  # embeddings of length 1
        cosine: Tensor = (got * wanted).sum(-1).mean()
        return 1 - cosine
    return divergence(got, wanted, batch)
