"""Retrieval heads: a planted one is told, spoilt ones are not; without room they are refused."""

import random

import pytest
import torch

from headprune.config import DataConfig, RolesConfig
from headprune.data.needles import KEYS
from headprune.errors import DataError, HeadpruneWarning
from headprune.model.answers import Answers
from headprune.model.attention import attention_of
from headprune.role import ROLES, inputs
from headprune.role.inputs import needles_input
from headprune.role.scores import scored
from headprune.role.watch import watch
from tests import planted, tiny
from tests.test_needle import words

CONFIG = RolesConfig(sequences=150, seq_len=60, resamples=200, needle_lengths=(64,))
BACK = 12  # tokens from where a number is asked for to where it is told, right before that


def finder():
    """Head 1.0 looks at what came after an earlier copy, and writes it over the token itself."""
    model = planted.gpt2()
    planted.offset(model, 0, 0, by=1)
    planted.copies(model, 0)
    planted.induction(model, 0)
    planted.writes(model, 1, 0)
    model.transformer.h[1].attn.c_proj.weight.data *= 5
    return model


def given(model, folder, config=CONFIG):
    text, draw = folder / "text.txt", random.Random(0)
    text.write_text(" ".join(draw.choices([*KEYS, "w"], k=2000)))
    return needles_input(model, words(), DataConfig(source=str(text)), config)


def told(model, contexts):
    """Of the heads of every layer."""
    assert contexts is not None
    attentions = attention_of(model)
    seen = watch(model, attentions, contexts, {"retrieval": ROLES["retrieval"]}, {})
    modules = scored(attentions, seen.sums, seen.controls, CONFIG)
    return [[head.scores["retrieval"] for head in module.heads] for module in modules]


def test_a_head_that_copies_a_needle_is_told_and_a_spoilt_one_is_not(tmp_path):
    model = finder()
    planted.induction(model, 1)
    _, key = planted._columns(model, 1, 1)
    with torch.no_grad():  # it looks at what came after another token
        key.copy_(key.roll(1, 1))
    planted.offset(model, 1, 2, by=BACK)  # it finds a needle by place, at one depth of five
    found = told(model, given(model, tmp_path))[1]
    assert [score.state for score in found] == ["over", "under", "under", "under"]
    assert found[0].score > 0.99  # a digit that comes twice may be told in the other place
    assert (found[0].control, found[3].score) == (0, 0) and found[1].score < 0.01
    assert found[2].score > 0.1  # which would be nearly enough
    assert found[2].control == pytest.approx(found[2].score, abs=0.1)


def test_a_model_that_finds_no_or_few_needles_has_no_scores(tmp_path, monkeypatch):
    model = finder()
    planted.shuffled(model, 1, 0)
    with pytest.warns(HeadpruneWarning, match=r"finds 0 of 150 needles.*left out"):
        assert given(model, tmp_path) is None
    monkeypatch.setattr(inputs, "FEWEST_NEEDLES", 151)
    with pytest.warns(HeadpruneWarning, match="67 of them .* and 151 are needed"):
        assert given(finder(), tmp_path) is None


def test_random_heads_do_not_retrieve(tmp_path, monkeypatch):
    """Even where all needles are taken for found."""
    monkeypatch.setattr(inputs, "answered", lambda _, rows, size: Answers([1] * len(rows), []))
    model = tiny.model("llama-gqa")
    states = [score.state for layer in told(model, given(model, tmp_path)) for score in layer]
    assert len(states) == 24 and "over" not in states


@pytest.mark.parametrize(
    ("case", "length", "said"),
    [
        ("bert-mlm", 64, "this one is a BertForMaskedLM"),
        ("gpt2", 20, "Give needle_lengths of 41 or more"),
    ],
)
def test_a_context_without_room_is_refused(case, length, said, tmp_path):
    config = CONFIG.model_copy(update={"needle_lengths": (length,)})
    with pytest.raises(DataError, match=said):
        given(tiny.model(case), tmp_path, config)
