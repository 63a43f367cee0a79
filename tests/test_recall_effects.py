"""Heads that carry what only the passage tells."""

import pytest
import torch

from headprune.config import DataConfig, ScoreConfig
from headprune.data.passages import passage_words
from headprune.data.read import read_examples
from headprune.evidence import recall
from headprune.evidence.criteria import per_unit
from headprune.evidence.recall import effects
from headprune.evidence.score import score
from headprune.model.answers import Prompt
from headprune.model.attention import attention_of
from headprune.model.gating import fixed, gated
from headprune.placements import Placement, placing
from headprune.tensors.units import Unit, members
from tests import tiny
from tests.test_last_words import passage_text, tokenizer

WORDS = [Prompt([5, 9, 12, 7, 20, 33, 9, 12, 3, 8], 8), Prompt([8, 3, 12, 9, 33, 20, 7], 6)]


def log_probability(model, gates):
    """That of the words, without ``evidence.recall``."""
    total = 0.0
    with torch.no_grad(), gated(attention_of(model), fixed(gates)):
        for word in WORDS:
            log_p = model(input_ids=torch.tensor([word.ids])).logits[0].log_softmax(-1)
            places = range(word.start, len(word.ids))
            total += sum(float(log_p[at - 1, word.ids[at]]) for at in places)
    return total


def test_effects_are_the_slope_of_the_log_probability():
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
                values.append(log_probability(model, gates))
            slopes.append((values[0] - values[1]) / (2 * step))
    slope = torch.tensor(slopes, dtype=torch.float64)
    assert float((measured - slope).abs().max()) < 1e-3 * float(slope.abs().max())
    assert float((measured.roll(1) - slope).abs().max()) > 0.1 * float(slope.abs().max())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_scores_are_raised_by_a_share_of_their_sum():
    scores, carried = torch.tensor([60.0, 39.5, 0.5, 0.0]), torch.tensor([-5.0, 0.0, 1.0, 9.0])
    more = 100 * recall.SHARE
    raised = recall.raised(scores, carried)
    assert raised.tolist() == pytest.approx([60.0, 39.5, 0.5 + more / 10, more * 9 / 10])
    assert raised[3] > raised[2] and scores[3] < scores[2]
    assert torch.equal(recall.raised(scores, -carried.abs()), scores)


@pytest.mark.parametrize("unit", [Unit.HEAD, Unit.KV_GROUP])
def test_scores_are_raised_where_the_text_has_passages(unit, tmp_path, monkeypatch):
    monkeypatch.setattr(recall, "PASSAGES", 10**6)  # it predicts few by chance
    model, words = tiny.model("llama-gqa"), tokenizer()
    folder = tiny.save(model, tmp_path / "model")
    words.save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text("\n".join(passage_text(model, words, 24)))
    data, config = DataConfig(source=str(text)), ScoreConfig(unit=unit, seq_len=16)
    plain = config.model_copy(update={"criterion": ("fisher",)})
    assert not score(folder, tmp_path / "plain", plain, data).metadata.recalls
    kept = score(folder, tmp_path / "kept", config, data)
    assert kept.metadata.recalls
    given = passage_words(read_examples(data), 10**6, words, None, inside=True)
    told = recall.passage_dependent_words(model, given, 4)
    heads = effects(model, attention_of(model), told)
    units = [members(unit, a.group_sizes) for a in attention_of(model)]
    carried = torch.cat([per_unit(h, u) for h, u in zip(heads, units, strict=True)])
    with placing(Placement.LAYERS):
        layers = score(folder, tmp_path / "layers", config, data)
    assert torch.allclose(kept.scores["compensated"], layers.scores["compensated"], rtol=1e-4)
    monkeypatch.setattr(recall, "FEWEST", len(told) + 1)
    few = score(folder, tmp_path / "few", config, data)
    assert not few.metadata.recalls
    now, before = (each.scores["compensated"] for each in (kept, few))
    assert torch.allclose(now, recall.raised(before, carried))
    assert not torch.allclose(now, recall.raised(before, carried.roll(1)))
