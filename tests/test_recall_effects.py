"""Heads that carry what only the passage tells."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from headprune.config import DataConfig, ScoreConfig
from headprune.data.passages import PassageWord, Prompt, passage_words
from headprune.data.read import read_examples
from headprune.evidence import recall
from headprune.evidence.criteria import per_unit
from headprune.evidence.recall import effects
from headprune.evidence.score import score
from headprune.model.attention import attention_of
from headprune.model.gating import fixed, gated
from headprune.tensors.units import Unit, members
from tests import tiny
from tests.test_last_words import passage_text, tokenizer

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


def test_units_that_carry_words_come_first_and_the_others_keep_their_order() -> None:
    scores = torch.tensor([5.0, 1.0, 3.0, 2.0, 4.0, 0.0, 8.0, 7.0, 6.0])
    carried = torch.tensor([0.0, 9.0, -9.0, 8.0, 0.1, 0.2, 0.3, 0.0, 0.0])
    order = recall.raised(scores, carried).argsort(descending=True).tolist()
    assert order == [3, 1, 6, 7, 8, 0, 4, 2, 5]  # two of nine, the more replaceable one last
    assert torch.equal(scores, torch.tensor([5.0, 1.0, 3.0, 2.0, 4.0, 0.0, 8.0, 7.0, 6.0]))


@pytest.mark.parametrize("unit", [Unit.HEAD, Unit.KV_GROUP])
def test_scores_rank_them_first_where_the_text_has_passages(
    unit: Unit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, words = tiny.model("llama-gqa"), tokenizer()
    folder = tiny.save(model, tmp_path / "model")
    words.save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text("\n".join(passage_text(model, words, recall.FEWEST)))
    data, config = DataConfig(source=str(text)), ScoreConfig(unit=unit, seq_len=16)
    plain = score(
        folder, tmp_path / "plain", config.model_copy(update={"criterion": ("fisher",)}), data
    )
    assert plain.metadata.passages == 0
    kept = score(folder, tmp_path / "kept", config, data)
    assert kept.metadata.passages == recall.FEWEST
    given = passage_words(read_examples(data), 100, words, None)
    heads = effects(model, attention_of(model), given)
    units = [members(unit, a.group_sizes) for a in attention_of(model)]
    carried = torch.cat([per_unit(h, u) for h, u in zip(heads, units, strict=True)])
    first = kept.scores["compensated"].argsort(descending=True)[: round(len(carried) * 2 / 9)]
    assert set(first.tolist()) == set(carried.topk(len(first)).indices.tolist())
    monkeypatch.setattr(recall, "FEWEST", recall.FEWEST + 1)
    few = score(folder, tmp_path / "few", config, data)
    assert few.metadata.passages == 0
    assert not torch.equal(few.scores["compensated"], kept.scores["compensated"])
