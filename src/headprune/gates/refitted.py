"""Heads chosen by scores and W_O refitted, before one factor per head is trained.

Scores and a refit (``evidence.criteria.compensated``, ``surgery.refit``) choose better heads than
gates that choose while they train, with a hundredth of the work. So the choice comes first, and all
steps go to the factors.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.config import ScoreConfig
from headprune.context import Context
from headprune.data.passages import PassageWord
from headprune.data.text import Sequences
from headprune.errors import DataError, PlanError
from headprune.evidence.score import gather, refits, scores_of
from headprune.evidence.statistics import collect
from headprune.gates.gates import Gates
from headprune.model.attention import attention_of, family_of
from headprune.model.gating import open_elsewhere
from headprune.runtime.modeling_headprune import Attention
from headprune.surgery.refit import refit
from headprune.tensors.selection import keep_best
from headprune.tensors.units import members

CRITERION = "compensated"
ENOUGH = 4096  # tokens for a refit by default


def can_refit(net: PreTrainedModel, examples: Sequences) -> bool:
    """Return whether there is text enough, and every W_O in one place, to refit by default."""
    if examples.tokens < ENOUGH:
        return False
    first = collect(net, attention_of(net), [examples.first()], frozenset({"activations"}))
    return refits(first, examples)


def original_of(net: PreTrainedModel, changed: Iterable[nn.Parameter]) -> nn.Module | None:
    """Return a copy that shares all weights but the changed ones; None if none changes."""
    changing = {id(weight) for weight in changed}
    if not changing:
        return None
    shared = {id(p): p for p in net.parameters() if id(p) not in changing}
    original: nn.Module = copy.deepcopy(net, shared)
    return original.requires_grad_(False)


def output_weights(attentions: Sequence[Attention]) -> list[nn.Parameter]:
    """Return every W_O and its bias: the weights that a refit changes."""
    some = (a for a in attentions if a.query_heads)
    return [weight for a in some for weight in a.output_projection.parameters()]


def choose_and_refit(
    net: PreTrainedModel,
    attentions: Sequence[Attention],
    gates: Gates,
    heads: int,
    examples: Sequences,
    words: Sequence[PassageWord],
    context: Context,
) -> None:
    """Close the gates of the units that matter least, and refit every W_O to the others.

    Args:
        net: The model; its output projections change.
        attentions: The modules that have gates.
        gates: Their gates.
        heads: Query heads that stay.
        examples: Calibration text.
        words: Words of it that stand earlier in their passage.
        context: Progress.

    Raises:
        DataError: If there is too little text, or something is not finite.
        PlanError: If a module runs more than once.
    """
    try:
        with _in_float32(net):
            config = ScoreConfig(criterion=(CRITERION,), unit=gates.unit)
            evidence = gather(net, attentions, config, examples, words, context)
            scores = scores_of(CRITERION, evidence, attentions, gates.unit)
            worth = scores
            if family_of(net.config).keeps_a_head:
                counts = [len(members(gates.unit, a.group_sizes)) for a in attentions]
                worth = best_first(scores, counts)
            kept = set(keep_best(worth.tolist(), gates.unit_sizes, heads))
            gates.fix_by_scores(sorted(kept), scores)
            context.stage("refitting")
            of_head = gates.values().detach()[gates.unit_of_head].cpu()
            sizes = [attention.query_heads for attention in attentions]
            every = attention_of(net)
            rows = open_elsewhere(every, attentions, of_head.split(sizes))
            refit(net, every, rows, examples.whole(), context.step)
    except (DataError, PlanError) as error:
        raise type(error)(f"{error} Nothing is refitted with --method l0.") from None


def best_first(scores: Float[Tensor, " units"], counts: Sequence[int]) -> Float[Tensor, " units"]:
    """Return scores with the best unit of every module before all others."""
    parts = scores.clone().split(list(counts))
    for part in parts:
        part[part.argmax()] += scores.max() - scores.min() + 1
    return torch.cat(parts)


@contextmanager
def _in_float32(net: PreTrainedModel) -> Iterator[None]:
    """Hold weights of half precision in float32 for a time: least squares need it."""
    half = [p for p in net.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
    before = [weight.dtype for weight in half]
    for weight in half:
        weight.data = weight.data.float()
    try:
        yield
    finally:
        for weight, dtype in zip(half, before, strict=True):
            weight.data = weight.data.to(dtype)
