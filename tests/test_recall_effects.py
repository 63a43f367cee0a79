"""Heads that carry what only the passage tells."""

from __future__ import annotations

import torch
from torch import Tensor

from headprune.data.passages import PassageWord, Prompt
from headprune.evidence.recall import effects
from headprune.model.attention import attention_of
from headprune.model.gating import fixed, gated
from tests import tiny

ROW, ALONE = [5, 9, 12, 7, 20, 33, 9, 12, 3, 8], [33, 9, 12, 3, 8]
WORDS = [
    PassageWord(Prompt(ROW, 8), Prompt(ALONE, 3)),
    PassageWord(Prompt(ROW[::-1], 9), Prompt(ALONE[::-1], 4)),
]


def added(model: torch.nn.Module, gates: list[Tensor]) -> float:
    """The probability that passages add to their words, without ``evidence.recall``."""
    total = 0.0
    with torch.no_grad(), gated(attention_of(model), fixed(gates)):
        for word in WORDS:
            for sign, prompt in ((1, word.row), (-1, word.alone)):
                ids = torch.tensor([prompt.ids])
                p = model(input_ids=ids).logits[0].double().softmax(-1)
                places = range(prompt.start, len(prompt.ids))
                total += sign * float(
                    torch.tensor([p[at - 1, prompt.ids[at]] for at in places]).prod()
                )
    return total


def test_effects_are_the_slope_of_what_passages_add() -> None:
    model = tiny.model("llama-gqa", torch.float64)
    attentions = attention_of(model)
    measured = torch.cat(effects(model, attentions, WORDS))
    slopes, step = [], 1e-3
    for module, attention in enumerate(attentions):
        for head in range(attention.query_heads):
            values = []
            for sign in (1, -1):
                gates = [torch.ones(a.query_heads, dtype=torch.float64) for a in attentions]
                gates[module][head] += sign * step
                values.append(added(model, gates))
            slopes.append((values[0] - values[1]) / (2 * step))
    slope = torch.tensor(slopes, dtype=torch.float64)
    assert float((measured - slope).abs().max()) < 1e-3 * float(slope.abs().max())
    assert float((measured.roll(1) - slope).abs().max()) > 0.1 * float(slope.abs().max())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
