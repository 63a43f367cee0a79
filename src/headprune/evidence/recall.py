"""Heads that carry what only the passage tells.

A cut that costs 9 % of perplexity may lose a quarter of the words that stand earlier in a passage,
and nowhere near their place: few tokens are such words, and a mean loss hardly weighs them. So
heads are judged by these words apart. With p the probability of a word, the effect of a head is

    sum over passages of  d/dz [p(word | passage) - p(word | its own sentence)]

where z is the head's gate: to first order, the number of words that go with the head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from headprune.data.passages import PassageWord, Prompt
from headprune.model.gating import gated
from headprune.model.passes import logits_at
from headprune.runtime.modeling_headprune import Attention

PASSAGES = 128  # that are read, at most
FEWEST = 32  # passages that an order of heads rests on
SHARE = 2 / 9  # of the units that rank above all others


def effects(
    model: PreTrainedModel, attentions: Sequence[Attention], words: Iterable[PassageWord]
) -> list[Float[Tensor, " _heads"]]:
    """Return, per module, how many words go with each query head, to first order.

    Args:
        model: A causal language model; it stays as it is.
        attentions: Its attention modules.
        words: Words that stand earlier in their passage.
    """
    gates = [torch.ones(1, a.query_heads, device=model.device) for a in attentions]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)
    try:
        with gated(attentions, lambda position: gates[position].requires_grad_()):
            for word in words:
                (_probability(model, word.row) - _probability(model, word.alone)).backward()
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
    zeros = (torch.zeros_like(gate) if gate.grad is None else gate.grad for gate in gates)
    return [gradient[0].double().cpu() for gradient in zeros]


def raised(
    scores: Float[Tensor, " units"], effects: Float[Tensor, " units"]
) -> Float[Tensor, " units"]:
    """Return scores in which the units with the largest effects come first."""
    first = effects.topk(round(SHARE * len(effects))).indices
    result = scores.clone()
    result[first] += scores.max() - scores.min()
    return result


@torch.enable_grad()
def _probability(model: PreTrainedModel, prompt: Prompt) -> Tensor:
    """Return the probability of a prompt's answer."""
    ids = torch.tensor([prompt.ids])
    places = torch.arange(prompt.start, len(prompt.ids))[None]
    logits = logits_at(model, ids, torch.ones_like(ids), places - 1).float()
    answer = ids.gather(1, places)[..., None].to(logits.device)
    return logits.log_softmax(-1).gather(-1, answer).sum().exp()
