"""Words that only the passage tells, and the heads that carry them.

A cut that costs 9 % of perplexity may lose a quarter of these words: few tokens are such words, and
a mean loss hardly weighs them. So heads are judged by them apart. To first order, the log
probability that goes with a head, whose gate is z, is

    sum over words of  d log p(word | passage) / dz
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from headprune.context import Progress
from headprune.data.passages import PassageWord
from headprune.model.answers import Prompt, answered
from headprune.model.gating import frozen, gated
from headprune.model.passes import logits_at
from headprune.runtime.modeling_headprune import Attention

PASSAGES = 256  # to try, at most
WORDS = 64  # of them, at most, whose heads to find
FEWEST = 16  # words that an order of heads rests on
SHARE = 0.01  # of the sum of all scores, that effects add: docs/experiments.md


def passage_dependent_words(
    model: PreTrainedModel,
    words: Sequence[PassageWord],
    batch_size: int,
    progress: Progress = lambda done, total: None,
) -> list[Prompt]:
    """Return the words that only their passage tells, as prompts.

    They stand in it, but not in their own sentence, and the model predicts them after the passage,
    not after that sentence alone.
    """
    hits = answered(model, [word.row for word in words], batch_size, progress).hits
    known = [word for word, hit in zip(words, hits, strict=True) if hit]
    hits = answered(model, [word.alone for word in known], batch_size).hits
    return [word.row for word, hit in zip(known, hits, strict=True) if not hit]


def effects(
    model: PreTrainedModel, attentions: Sequence[Attention], words: Iterable[Prompt]
) -> list[Float[Tensor, " _heads"]]:
    """Return, per module, the log probability of the words that goes with each query head.

    Args:
        model: A causal language model; it stays as it is.
        attentions: Its attention modules.
        words: The words, after their passages.
    """
    gates = [torch.ones(1, a.query_heads) for a in attentions]
    with frozen(model), gated(attentions, lambda position: gates[position].requires_grad_()):
        for word in words:
            _log_probability(model, word).backward()
    slopes = (torch.zeros_like(gate) if gate.grad is None else gate.grad for gate in gates)
    return [slope[0].double().cpu() for slope in slopes]


@torch.enable_grad()
def _log_probability(model: PreTrainedModel, prompt: Prompt) -> Tensor:
    ids = torch.tensor([prompt.ids])
    places = torch.arange(prompt.start, len(prompt.ids))[None]
    logits = logits_at(model, ids, torch.ones_like(ids), places - 1).float()
    answer = ids.gather(1, places)[..., None].to(logits.device)
    return logits.log_softmax(-1).gather(-1, answer).sum()


def raised(
    scores: Float[Tensor, " units"], effects: Float[Tensor, " units"]
) -> Float[Tensor, " units"]:
    """Return the scores of units, none below zero, raised where the words need them."""
    needs = effects.clamp(min=0)
    return scores + SHARE * scores.sum() * needs / needs.sum().clamp(min=1e-30)
