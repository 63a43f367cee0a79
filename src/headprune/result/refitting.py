"""The refit of a cut, taken only where it helps on sequences that nothing was fitted to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headprune.context import Context
from headprune.data.text import Sequences, Text
from headprune.errors import DataError
from headprune.model.batch import Batch, size_of
from headprune.model.embedding import Head, embedding, head_of
from headprune.model.loading import task_of
from headprune.model.losses import divergence
from headprune.model.passes import run_model
from headprune.schemas.records import Refit, RefitWorth
from headprune.surgery.edit import Edit, Tensors, collecting, trying
from headprune.surgery.refit import refit

_DISTANCES = {
    "features": "1 - cosine to the embeddings of the original",
    "regression": "squared difference from the original",
    **dict.fromkeys(
        ("classification", "multi-label"), "divergence (nats per example) from the original"
    ),
}


@dataclass(frozen=True)
class JudgedRefit:
    """A refit and its worth.

    Attributes:
        taken: Its record; None where it was left out.
        worth: Its worth on held-out sequences, if possible on other ones than it was chosen
            by; None where the text has none.
        tensors: The refitted weights by name; none where it was left out.
    """

    taken: Refit | None
    worth: RefitWorth | None
    tensors: Tensors = field(default_factory=dict)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why it was left out, if it was."""
        if self.taken is not None or self.worth is None:
            return ()
        return (
            f"The refit was left out: on {self.worth.tokens:,} tokens that it was not fitted to, "
            f"{self.worth.measure} is {self.worth.refitted:.4g} with it and "
            f"{self.worth.without:.4g} without.",
        )


def judged_refit(
    net: PreTrainedModel,
    edit: Edit,
    text: Text,
    source: str,
    seed: int,
    context: Context,
    reports: bool = True,
) -> JudgedRefit:
    """Refit every W_O of an edit, unless that makes it worse on held-out sequences.

    Args:
        net: The model; its weights stay as they are.
        edit: The heads that go.
        text: Fits, chooses and reports.
        source: Place of the text, for the record.
        seed: Seed of the sample, for the record.
        context: Progress.
        reports: Whether the worth is measured once more, on sequences that chose nothing.

    Raises:
        DataError: If there is too little text, or the outputs are not finite.
        PlanError: If a module runs more than once.
    """
    cuts = [cut for cut in edit.cuts(net) if cut.attention.query_heads]
    attentions, gates = [cut.attention for cut in cuts], [cut.gate() for cut in cuts]
    with collecting(net, attentions) as tensors:
        modules = refit(net, attentions, gates, text.fit.whole(), context.step)
    taken = Refit(
        data=source,
        tokens=text.fit.tokens,
        modules=len(modules),
        error_before=sum(m.before for m in modules) / max(len(modules), 1),
        error_after=sum(m.after for m in modules) / max(len(modules), 1),
        seed=seed,
    )
    if not text.choose.rows or not modules:
        return JudgedRefit(taken, None, tensors)
    context.stage("measuring the refit")
    worth = _worth(net, edit, tensors, text.choose, context)
    if worth.refitted > worth.without:
        return JudgedRefit(None, worth)
    if reports and text.report.rows:
        worth = _worth(net, edit, tensors, text.report, context)
        taken = taken.model_copy(update={"held_out": worth})
    return JudgedRefit(taken, worth, tensors)


@torch.no_grad()
def _worth(
    net: PreTrainedModel,
    edit: Edit,
    tensors: Tensors,
    sequences: Sequences,
    context: Context,
) -> RefitWorth:
    """Measure an edit with and without refitted weights; every sequence counts alike."""
    head, batches = head_of(net), sequences.batches(1)
    distances: list[list[float]] = [[], []]
    for batch in context.each(batches):
        wanted = _outputs(net, batch)
        for number, version in enumerate((edit, replace(edit, tensors=tensors))):
            with trying(net, version):
                distances[number].append(
                    float(_distance(_outputs(net, batch), wanted, batch, head))
                )
    if not math.isfinite(sum(map(sum, distances))):
        raise DataError(
            "The outputs of the cut model on held-out sequences are not finite. Try dtype "
            "float32, or cut without a refit."
        )
    without, refitted = map(fmean, distances)
    return RefitWorth(
        measure=_distance_name(net),
        tokens=sum(map(size_of, batches)),
        without=without,
        refitted=refitted,
    )


def _distance_name(model: PreTrainedModel) -> str:
    """Name ``_distance`` for a model, in words."""
    return _DISTANCES.get(task_of(model), "divergence (nats per token) from the original")


def _outputs(model: PreTrainedModel, batch: Batch) -> Any:
    """Return the judged outputs of a model: of its head, or embeddings where it has none."""
    if task_of(model) == "features":
        return embedding(model, batch)
    return run_model(model, batch, head=True)


def _distance(got: Any, wanted: Any, batch: Batch, head: Head) -> Tensor:
    """Return the distance to the original's: a divergence, or 1 - cosine of embeddings."""
    if isinstance(got, Tensor):  # embeddings of length 1
        cosine: Tensor = (got * wanted).sum(-1).mean()
        return 1 - cosine
    return divergence(got, wanted, batch, head)
