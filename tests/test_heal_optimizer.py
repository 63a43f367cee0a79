"""Muon and AdamW as one optimiser of healing."""

import json
from itertools import combinations

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import nn

from headprune import from_pretrained, placements
from headprune.config import DataConfig, HealConfig, HealOptimizer, HealTrain, Objective
from headprune.data.batches import Batches, batches
from headprune.distillation import heal as heal_module
from headprune.distillation import optimizer as module
from headprune.distillation.heal import heal
from headprune.distillation.optimizer import LOGIT_RATE, MuonAndAdamW, matrices, resolved
from headprune.distillation.trainer import HealedModel, HealTrainer, merged, trainable
from headprune.errors import DataError, HeadpruneError
from headprune.model.attention import attention_of
from headprune.schemas.records import Healing
from tests import tiny

MUON, ADAMW = HealOptimizer.MUON, HealOptimizer.ADAMW


@pytest.mark.parametrize("case", ["llama-gqa", "gpt2", "bert-base"])
def test_matrices_are_those_of_the_layers(case):
    net = tiny.model(case)
    found = {id(weight) for weight in matrices(net)}
    names = [name for name, weight in net.named_parameters() if id(weight) in found]
    left = [name for name, weight in net.named_parameters() if id(weight) not in found]
    assert all(".layers." in n or ".h." in n or ".layer." in n or "pooler" in n for n in names)
    assert not any("proj.weight" in n or "mlp.c_fc.weight" in n for n in left)
    assert any("embed" in n or "wte" in n for n in left)
    net.requires_grad_(False)
    assert matrices(net) == []


def two():
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(5))


def step(optimizer, weights):
    for weight in weights:
        weight.grad = weight.detach().sin()
    optimizer.step()


def test_it_steps_as_both_do_also_after_its_state_was_loaded():
    logits = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    one, other = (*two(), logits[0]), (*two(), logits[1])
    alone = [
        torch.optim.Muon(other[:1], lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(other[1:2], lr=0.1, weight_decay=0.0),
        torch.optim.AdamW(other[2:], lr=0.1 * LOGIT_RATE, weight_decay=0.0),
    ]

    def made():
        return MuonAndAdamW([one[0]], [one[1]], 0.1, [one[2]])

    both = made()
    for number in range(4):
        if number == 2:
            state = both.state_dict()
            both = made()
            both.load_state_dict(state)
        step(both, one)
        for each in alone:
            step(each, other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    step(made(), one)  # without what it had gathered
    step(alone[0], other)
    assert not torch.equal(one[0], other[0])


def test_a_learning_rate_that_is_lowered_reaches_both():
    weights = two()
    both = MuonAndAdamW([weights[0]], [weights[1]], 0.1)
    torch.optim.lr_scheduler.LambdaLR(both, lambda step: 0.0)
    before = [weight.detach().clone() for weight in weights]
    step(both, weights)
    assert all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))


def chosen(**settings):
    config = resolved(HealConfig(steps=1, **settings))
    return config.optimizer, config.learning_rate


def test_which_is_chosen(monkeypatch):
    monkeypatch.setattr(module.devices, "computes_bfloat16", lambda: True)
    assert chosen() == (MUON, 2e-4)
    assert chosen(learning_rate=1e-3) == (MUON, 1e-3)
    assert chosen(optimizer=ADAMW) == (ADAMW, 1e-4)
    assert chosen(train=HealTrain.LORA) == (ADAMW, 1e-4)
    with pytest.raises(ValueError, match="--config optimizer=muon does not go with --train lora"):
        chosen(optimizer=MUON, train=HealTrain.LORA)
    with placements.sharding(True):
        assert chosen() == (ADAMW, 1e-4)
        with pytest.raises(HeadpruneError, match="--shard splits them"):
            chosen(optimizer=MUON)
    monkeypatch.setattr(module.devices, "computes_bfloat16", lambda: False)
    assert chosen() == (ADAMW, 1e-4)
    assert chosen(optimizer=MUON) == (MUON, 2e-4)
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(HeadpruneError, match="needs torch 2.9 or newer"):
        chosen(optimizer=MUON)


@pytest.mark.parametrize(
    ("case", "asked", "objective"),
    [
        ("llama-gqa", "auto", "lm+distill"),
        ("llama-gqa", "distill", "distill"),
        ("bert-base", "auto", "distill"),
        ("bert-base", "lm+distill", None),
    ],
)
def test_what_healing_trains_on_is_recorded(case, asked, objective, text_file, tmp_path):
    folder = tiny.save(tiny.model(case), tmp_path / "model")
    config = HealConfig(steps=1, batch_size=2, seq_len=16, objective=asked, optimizer=ADAMW)
    arguments = (folder, folder, DataConfig(source=str(text_file)), tmp_path / "out", config)
    if objective is None:
        with pytest.raises(HeadpruneError, match="is for causal language models"):
            heal(*arguments)
        assert not list(tmp_path.glob("out*"))
        return
    done = heal(*arguments).pruned.manifest.done
    assert isinstance(done, Healing)
    assert (done.objective, done.optimizer, done.learning_rate) == (objective, "adamw", 1e-4)


@pytest.mark.parametrize("noise", [0.01, 1.0])
def test_a_model_near_its_teacher_learns_less_of_the_text(
    noise, llama_folder, text_file, tmp_path, monkeypatch
):
    made = []

    class Seen(HealedModel):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(heal_module, "HealedModel", Seen)
    plain, measured = HealTrainer.held_out, list[float]()

    def held_out(self, rows=None):
        measured.append(plain(self, rows))
        return measured[-1]

    monkeypatch.setattr(HealTrainer, "held_out", held_out)
    net = from_pretrained(llama_folder)
    torch.manual_seed(0)
    for weight in net.parameters():
        weight.data += noise * torch.randn_like(weight)
    tiny.save(net, tmp_path / "model")
    config = HealConfig(steps=1, batch_size=2, seq_len=16)
    data = DataConfig(source=str(text_file))
    done = heal(tmp_path / "model", llama_folder, data, tmp_path / "out", config)
    assert (done.before < 0.5) is (noise < 0.1)
    assert [seen.own for seen in made] == [min(measured[0], 0.5)]  # of the rows that choose
    assert done.before == measured[2] != measured[1] > measured[0]


def test_half_of_the_loss_is_the_models_own(llama_folder):
    net, teacher = (from_pretrained(llama_folder) for _ in range(2))
    torch.manual_seed(0)
    for weight in net.parameters():
        weight.data += 0.02 * torch.randn_like(weight)
    ids = torch.arange(32).reshape(2, 16) % 30
    batch = {"input_ids": ids, "labels": ids}
    both = HealedModel(net, teacher, bf16=False)
    apart = both(batch)
    assert apart > 0
    both.own = 0.5
    for training in (True, False):  # checkpoints are chosen by what is trained
        loss = both.train(training)(batch)
        torch.testing.assert_close(loss, (apart + net(**batch).loss) / 2)


@pytest.mark.parametrize(("running", "lost", "few"), [(False, 0, 16), (True, 64, 10)])
def test_held_out_rows_come_from_all_texts_of_a_concatenation(running, lost, few):
    """Of running text, the rows beside those that are held out are lost."""
    numbers = np.repeat(np.arange(6), 100)

    def parts(count, of_step):
        rows = Dataset.from_dict({"input_ids": [[text] * 4 for text in numbers[:count].tolist()]})
        begins = numbers[:count] if running else None
        return list(Batches(rows, lambda _: {}, of_step, begins).split())

    trained, choosing, reported = parts(600, 8)
    for part in (choosing, reported):
        assert len(part) == 16
        assert {ids[0] for ids in part["input_ids"]} == set(range(6))
    assert len(trained) == 600 - 32 - lost
    assert [len(part) for part in parts(20, 8)] == [few, 2, 2]
    with pytest.raises(DataError, match="too few"):
        parts(7, 2)


@pytest.mark.parametrize(
    ("words", "seq_len"), [(200, 16), (30, 16), (5, 4)], ids=["long", "of two windows", "short"]
)
def test_no_document_is_both_trained_on_and_held_out(words, seq_len, tmp_path):
    """Every document has a word of its own."""
    of, file = tiny.tokenizer(), tmp_path / "rows.jsonl"
    rows = [json.dumps({"text": " ".join([f"w{n}"] * words)}) for n in range(59)]
    file.write_text("\n".join(rows))
    config = HealConfig(steps=1, seq_len=seq_len, batch_size=8)
    data = DataConfig(source=str(file))
    parts = batches(Objective.DISTILL, tiny.model("llama-gqa"), of, data, config).split()
    seen = [{token for ids in part["input_ids"] for token in ids} for part in parts]
    assert all(len(part) >= 2 for part in seen)
    assert set.union(*(a & b for a, b in combinations(seen, 2))) <= {of.eos_token_id}


@pytest.mark.parametrize("case", ["llama-gqa", "bert-base"])
def test_held_out_parts_of_a_text_adjoin_no_other_part(case, tmp_path):
    """The third and fourth word of every sentence are its number; a window is a sentence."""
    of, file = tiny.tokenizer(), tmp_path / "text.txt"
    numbers = [(n // 59, n % 59) for n in range(400)]
    file.write_text("\n\n".join(f"w58 w57 w{a} w{b} w56 w55 w54 w53" for a, b in numbers))
    config = HealConfig(steps=99, seq_len=8, batch_size=8)
    data = DataConfig(source=str(file))
    parts = batches(Objective.DISTILL, tiny.model(case), of, data, config).split()
    digits = [[of.convert_ids_to_tokens(ids[2:4]) for ids in part["input_ids"]] for part in parts]
    places = [{59 * int(a[1:]) + int(b[1:]) for a, b in part} for part in digits]
    assert [len(part) for part in places[1:]] == [16, 16] and len(places[0]) > 250
    for one, other in combinations(places, 2):
        assert not one & {place + step for place in other for step in (-1, 0, 1)}


def test_what_is_reported_of_a_healing_chose_nothing(
    llama_folder, text_file, tmp_path, monkeypatch
):
    """By the rows that choose, one checkpoint is perfect; the others are not impressed."""
    seen = []

    def held_out(self, rows=None):
        seen.append(rows or self.rows)
        return 7.0 if rows is not None else 1.0 / len(seen)

    monkeypatch.setattr(HealTrainer, "held_out", held_out)
    config = HealConfig(steps=2, batch_size=2, seq_len=16, save_every=1, optimizer=ADAMW)
    data = DataConfig(source=str(text_file))
    healed = heal(llama_folder, llama_folder, data, tmp_path / "out", config)
    assert (healed.before, healed.after, healed.taken_after) == (7.0, 7.0, 2)
    choosing, reported = (seen[at]["input_ids"] for at in (1, 2))
    assert not [ids for ids in reported if ids in list(choosing)]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks
def test_small_updates_of_lora_survive_bfloat16():
    config = HealConfig(steps=1, train=HealTrain.LORA)
    net = tiny.model("llama-gqa", torch.bfloat16)
    before = net.model.layers[1].self_attn.q_proj.weight.float()
    adapted = trainable(net, attention_of(net), config)
    layer = next(
        m for name, m in adapted.named_modules() if name.endswith("layers.1.self_attn.q_proj")
    )
    up, down = layer.lora_B["default"].weight, layer.lora_A["default"].weight
    up.data.fill_(1e-5)
    wanted = layer.scaling["default"] * (up @ down).detach()
    weight = merged(adapted, config).model.layers[1].self_attn.q_proj.weight
    torch.testing.assert_close(weight - before, wanted, rtol=1e-2, atol=1e-8)
    rounded = (before + wanted).bfloat16().float() - before
    assert (rounded == 0).float().mean() > 0.5
