"""Losses on the answers of chats alone."""

import json
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import headprune
from headprune.config import DataConfig
from headprune.config.data import Loss
from headprune.data.read import read_examples
from headprune.data.sequences import answer_rows
from headprune.errors import DataError, HeadpruneError
from headprune.model.embedding import Head
from headprune.model.losses import divergence
from tests import tiny

TEMPLATE = (
    "{% for m in messages %}w1 {{ 'w2' if m.role == 'user' else 'w3' }} {{ m.content }} w4 "
    "{% endfor %}"
)


def chat(number):
    words = tiny.text(40, number).split()
    parts = [words[:7], words[7:15], words[15:20], words[20 : 24 + number % 5]]
    roles = ("user", "assistant") * 2
    return [{"role": r, "content": " ".join(p)} for r, p in zip(roles, parts, strict=True)]


@pytest.fixture
def model(tmp_path):
    folder = tiny.save(tiny.model("llama-gqa"), tmp_path / "model")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def chats(tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": chat(n)}) + "\n" for n in range(40)))
    return file


def by_hand(net, number):
    """The loss of the answers of a chat, each with the word that ends it."""
    tokenizer = tiny.tokenizer()
    ids, counted = list[int](), list[bool]()
    for message in chat(number):
        answers = message["role"] == "assistant"
        words = ["w1", "w3" if answers else "w2", *message["content"].split(), "w4"]
        ids += tokenizer.convert_tokens_to_ids(words)
        counted += [answers and place > 1 for place in range(len(words))]
    with torch.no_grad():
        logits = net(input_ids=torch.tensor([ids])).logits[0, :-1]
    losses = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    mask = torch.tensor(counted[1:])
    return float(losses[mask].sum()), int(mask.sum())


def test_the_loss_is_that_of_answers_and_their_ends(model, chats):
    report = headprune.evaluate(model, data=chats, loss="answers", speed=False, seq_len=64)
    value = {one.name: one.value for one in report.model.metrics}["nll_nats_per_token"]
    net = headprune.from_pretrained(model)
    sums = [by_hand(net, number) for number in range(40)]
    wanted = sum(loss for loss, _ in sums) / sum(count for _, count in sums)
    assert value == pytest.approx(wanted, rel=1e-5)
    whole = headprune.evaluate(model, data=chats, speed=False, seq_len=16)
    of_all = {one.name: one.value for one in whole.model.metrics}["nll_nats_per_token"]
    assert of_all != pytest.approx(wanted, rel=1e-5)


def test_needles_are_measured_beside_the_loss_of_answers(model, chats):
    how = {"needle": True, "needle_lengths": 64, "needle_trials": 2}
    how |= {"data": chats, "speed": False, "seq_len": 64}
    report = headprune.evaluate(model, loss="answers", **how)
    values = {one.name: one for one in report.model.metrics}
    assert values["needle_accuracy"].n == 10
    assert report.model.needle is not None and len(report.model.needle) == 5
    sums = [by_hand(headprune.from_pretrained(model), number) for number in range(40)]
    wanted = sum(loss for loss, _ in sums) / sum(count for _, count in sums)
    assert values["nll_nats_per_token"].value == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gates_and_healing_learn_answers(dtype, model, chats, tmp_path):
    small = {"data": chats, "loss": "answers", "steps": 3}
    small["seq_len"] = 64
    run = headprune.train_gates(model, tmp_path / "scored", target_heads=0.5, dtype=dtype, **small)
    assert run.metadata.judgement is not None
    run = headprune.train_gates(
        model, tmp_path / "gates", target_heads=0.5, dtype=dtype, train="attention", **small
    )
    assert run.metadata.kept_heads == 12
    headprune.prune(model, tmp_path / "cut", gates=tmp_path / "gates")
    healed = tiny.healed(tmp_path / "cut", model, tmp_path / "healed", chats, loss="answers")
    assert healed.taken_after > 0


def test_a_divergence_on_answers_reads_no_other_place():
    ids = torch.arange(6)[None]
    labels = torch.tensor([[-100, -100, 2, 3, -100, -100]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    wanted = torch.randn(1, 6, 9, generator=torch.Generator().manual_seed(0))

    def gap(place):
        moved = wanted.clone()
        moved[0, place, 0] += 3
        got, original = ({"logits": x} for x in (moved, wanted))
        return float(divergence(Outputs(got), Outputs(original), batch, Head("causal-lm")))

    assert [gap(place) > 0 for place in range(6)] == [False, True, True, False, False, False]


class Outputs(dict[str, Any]):
    """Outputs of a model: a mapping with attributes."""

    def __getattr__(self, name):
        return self[name]


def test_what_cannot_be_told_apart_is_refused(model, chats, tmp_path):
    data = DataConfig(source=str(chats), loss=Loss.ANSWERS)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("{{ m.content }}", "{{ m.content }} " * 2)
    with pytest.raises(DataError, match="template writes an answer in several places"):
        answer_rows(read_examples(data, tokenizer), tokenizer, 64)
    (tmp_path / "text.txt").write_text(tiny.text(100))
    how = {"loss": "answers", "seq_len": 64}
    with pytest.raises(DataError, match="loss=answers is of chats"):
        headprune.evaluate(model, data=tmp_path / "text.txt", **how)
    chats.write_text(json.dumps({"messages": chat(0)[:1]}) + "\n")
    with pytest.raises(DataError, match="a chat without an answer"):
        headprune.evaluate(model, data=chats, **how)
    encoder = tiny.save(tiny.model("bert-mlm"), tmp_path / "encoder")
    with pytest.raises(HeadpruneError, match="loss=answers is of a language model's chats"):
        headprune.evaluate(encoder, data=tmp_path / "text.txt", **how)
    how |= {"data": tmp_path / "text.txt", "target_heads": 4, "steps": 1}
    with pytest.raises(DataError, match="leave it out"):
        headprune.train_gates(encoder, tmp_path / "gates", **how)
