"""The loss of every example for itself."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from headprune.data.text import Sequences
from headprune.errors import DataError
from headprune.model.batch import Batch, inputs_of, token_mask
from headprune.model.embedding import embedding
from headprune.model.loading import WITHOUT_LOSS, Task
from headprune.model.passes import run_model
from headprune.tensors.draws import generator_for
from headprune.tensors.dtypes import in_float32

BY_EMBEDDING = ("features", "token-classification", "ctc", *WITHOUT_LOSS)


@torch.no_grad()
def mean_loss(net: PreTrainedModel, text: Sequences) -> float:
    """Return the mean loss of a language model over the tokens of a text, in nats."""
    total = tokens = 0.0
    for batch in text.batches():
        batch.setdefault("labels", batch["input_ids"])
        counts = (_predicted(batch, "causal-lm") != -100).sum(1).double()
        losses = example_losses(net, "causal-lm", batch).double().cpu()
        total, tokens = total + float(losses @ counts), tokens + float(counts.sum())
    return total / tokens


def example_losses(
    model: PreTrainedModel, task: Task, batch: Batch, seed: int = 0
) -> Float[Tensor, " examples"]:
    """Return the loss of every example: the mean over its scored tokens.

    A model without a head has no loss, nor has one with labels that headprune does not read. There
    the loss is the embedding (as ``evaluate`` takes it) along a random direction. On average, its
    squared gradient is that of the whole embedding.

    Raises:
        DataError: If there is nothing to score in an example, or labels are missing.
    """
    if task in BY_EMBEDDING:
        vectors = embedding(model, batch)
        return (vectors * _directions(batch, vectors.shape[-1], seed).to(vectors)).sum(-1)
    if batch.get("labels") is None:
        raise DataError(
            "A loss on this task needs labels: name the --label-column, or use a criterion that "
            "needs no loss (fluctuation, wanda, reconstruction)."
        )
    labels = batch["labels"]
    logits = run_model(model, batch, head=True).logits
    if task == "classification":
        return F.cross_entropy(in_float32(logits), labels.to(logits.device), reduction="none")
    if task in ("multi-label", "regression"):
        logits = in_float32(logits)
        labels = labels.view_as(logits).to(logits)
        loss = F.mse_loss if task == "regression" else F.binary_cross_entropy_with_logits
        return loss(logits, labels, reduction="none").mean(-1)
    logits, labels = logits[:, :-1] if task == "causal-lm" else logits, _predicted(batch, task)
    scored = labels != -100
    if not bool(scored.any(1).all()):
        row = int((~scored.any(1)).nonzero()[0])
        raise DataError(
            f"Example {row} of a batch has no tokens to score, only padding. Leave empty texts out."
        )
    labels, scored, told = labels.to(logits.device), scored.to(logits.device), in_float32(logits)
    # cross_entropy wants the vocabulary second, where its sums are slow and less exact
    right = told.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    mean: Tensor = (told.logsumexp(-1) - right).masked_fill(~scored, 0.0).sum(1) / scored.sum(1)
    return mean


def _predicted(batch: Batch, task: Task) -> Tensor:
    """Return the tokens that logits are to predict, one per place, and -100 where none."""
    labels = batch["labels"]
    if "attention_mask" in batch and "decoder_input_ids" not in batch:
        labels = labels.masked_fill(batch["attention_mask"] == 0, -100)
    return labels[:, 1:] if task == "causal-lm" else labels


def _directions(batch: Batch, width: int, seed: int) -> Float[Tensor, "examples width"]:
    """Return a random vector of signs per example, seeded by its own inputs, not by its batch."""
    mask, rows = token_mask(batch, "self"), []
    for number, given in enumerate(inputs_of(batch).cpu()):
        real = given if mask is None else given[mask[number].cpu()]
        real = real.float() if real.is_floating_point() else real  # numpy has no bfloat16
        generator = generator_for(str(seed).encode() + real.numpy().tobytes())
        rows.append(torch.randint(0, 2, (width,), generator=generator) * 2.0 - 1)
    return torch.stack(rows)
