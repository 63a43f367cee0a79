"""The distance of a cut model's outputs to the original's, by which cuts are judged."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from headprune.model.batch import Batch
from headprune.model.embedding import Head, embedding
from headprune.model.loading import task_of
from headprune.model.losses import divergence
from headprune.model.passes import run_model

_DISTANCES = {
    "features": "1 - cosine to the embeddings of the original",
    "regression": "squared difference from the original",
    **dict.fromkeys(
        ("classification", "multi-label"), "divergence (nats per example) from the original"
    ),
}


def distance_name(model: PreTrainedModel) -> str:
    """Name ``distance`` for a model, in words."""
    return _DISTANCES.get(task_of(model), "divergence (nats per token) from the original")


def outputs(model: PreTrainedModel, batch: Batch) -> Any:
    """Return the judged outputs of a model: of its head, or embeddings where it has none."""
    if task_of(model) == "features":
        return embedding(model, batch)
    return run_model(model, batch, head=True)


def distance(got: Any, wanted: Any, batch: Batch, head: Head) -> Tensor:
    """Return the distance to the original's: a divergence, or 1 - cosine of embeddings."""
    if isinstance(got, Tensor):  # embeddings of length 1
        cosine: Tensor = (got * wanted).sum(-1).mean()
        return 1 - cosine
    return divergence(got, wanted, batch, head)
