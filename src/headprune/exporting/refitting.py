"""The refit of a cut, taken only where it helps on sequences that nothing was fitted to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from transformers import PreTrainedModel

from headprune.context import Context
from headprune.data.samples import CalibrationSample
from headprune.errors import DataError
from headprune.evidence.distance import distance, distance_name, outputs
from headprune.model.embedding import head_of
from headprune.model.gating import fixed, gated
from headprune.model.heads import keeping_outputs
from headprune.schemas.records import Refit, RefitWorth
from headprune.surgery.cut import Cut
from headprune.surgery.refit import refit


@dataclass(frozen=True)
class JudgedRefit:
    """A refit, and what it is worth.

    Attributes:
        taken: The record of it; None where it was left out, and the weights are as before.
        worth: What it is worth on held-out sequences, where it was taken on others than those that
            chose; None where the text has none.
    """

    taken: Refit | None
    worth: RefitWorth | None

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
    cuts: Sequence[Cut],
    examples: CalibrationSample,
    source: str,
    seed: int,
    context: Context,
) -> JudgedRefit:
    """Refits every W_O of a model that is about to be cut, in place, unless that makes it worse.

    Args:
        net: The model, uncut.
        cuts: What it will lose.
        examples: Calibration text; what is held out are sequences of it that were not taken.
        source: Where the text came from, for the record.
        seed: Seed of the sample, for the record.
        context: What it runs in.

    Raises:
        DataError: If there is too little text, or the outputs are not finite.
        PlanError: If a module runs more than once.
    """
    cuts = [cut for cut in cuts if cut.attention.query_heads]  # of earlier cuts some have none
    attentions, gates = [cut.attention for cut in cuts], [cut.gate() for cut in cuts]
    whole = keeping_outputs(net, attentions)
    modules = refit(net, attentions, gates, examples.whole(), context.step)
    taken = Refit(
        data=source,
        tokens=examples.tokens,
        modules=len(modules),
        error_before=sum(m.before for m in modules) / max(len(modules), 1),
        error_after=sum(m.after for m in modules) / max(len(modules), 1),
        ridges={m.path: m.ridge for m in modules if math.isfinite(m.ridge)},  # the others stay
        seed=seed,
    )
    held_out = examples.held_out()
    if held_out is None or not modules:
        return JudgedRefit(taken, None)
    versions = whole, keeping_outputs(net, attentions)
    head = head_of(net)
    distances: list[list[float]] = [[], []]
    batches = held_out.batches()
    context.stage("measuring the refit")
    with torch.no_grad():
        for done, batch in enumerate(batches, 1):
            context.step(done, len(batches))
            whole()
            wanted = outputs(net, batch)
            for number, write_back in enumerate(versions):
                write_back()
                with gated(attentions, fixed(gates)):
                    found = distance(outputs(net, batch), wanted, batch, head)
                    distances[number].append(float(found))
    if not math.isfinite(sum(map(sum, distances))):
        raise DataError(
            "What the cut model makes of sequences that the refit was not fitted to is not finite. "
            "Try --config dtype=float32, or cut without a refit."
        )

    def worth(first: int) -> RefitWorth:
        """Of every other sequence; of a lone one in any case."""
        without, refitted = (fmean(some[first::2] or some) for some in distances)
        return RefitWorth(
            measure=distance_name(net),
            tokens=sum(batch["input_ids"].numel() for batch in batches[first::2] or batches),
            without=without,
            refitted=refitted,
        )

    choosing, reported = worth(0), worth(1)
    if choosing.refitted <= choosing.without:
        return JudgedRefit(taken.model_copy(update={"held_out": reported}), reported)
    whole()
    return JudgedRefit(None, choosing)
