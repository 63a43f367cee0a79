"""Muon and AdamW as one optimiser of healing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headprune import placements
from headprune.config import HealConfig, HealOptimizer, HealTrain
from headprune.distillation import optimizer as module
from headprune.distillation.optimizer import Chosen, MuonAndAdamW, matrices
from headprune.errors import HeadpruneError
from tests import tiny

MUON, ADAMW = HealOptimizer.MUON, HealOptimizer.ADAMW


@pytest.mark.parametrize("case", ["llama-gqa", "gpt2", "bert-base"])
def test_matrices_are_those_of_the_layers(case: str) -> None:
    net = tiny.model(case)
    found = {id(weight) for weight in matrices(net)}
    names = [name for name, weight in net.named_parameters() if id(weight) in found]
    left = [name for name, weight in net.named_parameters() if id(weight) not in found]
    assert all(".layers." in n or ".h." in n or ".layer." in n or "pooler" in n for n in names)
    assert not any("proj.weight" in n or "mlp.c_fc.weight" in n for n in left)
    assert any("embed" in n or "wte" in n for n in left)
    net.requires_grad_(False)
    assert matrices(net) == []


def two() -> tuple[nn.Parameter, nn.Parameter]:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(5))


def step(optimizer: torch.optim.Optimizer, weights: tuple[nn.Parameter, ...]) -> None:
    for weight in weights:
        weight.grad = weight.detach().sin()
    optimizer.step()


def test_it_steps_as_both_do_also_after_its_state_was_loaded() -> None:
    one, other = two(), two()
    alone = [
        torch.optim.Muon(other[:1], lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(other[1:], lr=0.1, weight_decay=0.0),
    ]
    both = MuonAndAdamW([one[0]], [one[1]], 0.1)
    for number in range(4):
        if number == 2:
            state = both.state_dict()
            both = MuonAndAdamW([one[0]], [one[1]], 0.1)
            both.load_state_dict(state)
        step(both, one)
        for each in alone:
            step(each, other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    step(MuonAndAdamW([one[0]], [one[1]], 0.1), one)  # without what it had gathered
    step(alone[0], other)
    assert not torch.equal(one[0], other[0])


def test_a_learning_rate_that_is_lowered_reaches_both() -> None:
    weights = two()
    both = MuonAndAdamW([weights[0]], [weights[1]], 0.1)
    torch.optim.lr_scheduler.LambdaLR(both, lambda step: 0.0)
    before = [weight.detach().clone() for weight in weights]
    step(both, weights)
    assert all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))


def test_which_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.devices, "computes_bfloat16", lambda: True)
    assert Chosen.of(HealConfig(steps=1)) == Chosen(MUON, 2e-4)
    assert Chosen.of(HealConfig(steps=1, learning_rate=1e-3)) == Chosen(MUON, 1e-3)
    assert Chosen.of(HealConfig(steps=1, optimizer=ADAMW)) == Chosen(ADAMW, 1e-4)
    for settings in ({"train": HealTrain.LORA}, {"by_layer": True}):
        assert Chosen.of(HealConfig(steps=1, **settings)) == Chosen(ADAMW, 1e-4)
        with pytest.raises(ValueError, match="--optimizer muon goes with neither"):
            HealConfig(steps=1, optimizer=MUON, **settings)
    asked = HealConfig(steps=1, optimizer=MUON)
    with placements.sharding(True):
        assert Chosen.of(HealConfig(steps=1)) == Chosen(ADAMW, 1e-4)
        with pytest.raises(HeadpruneError, match="--shard splits them"):
            Chosen.of(asked)
    monkeypatch.setattr(module.devices, "computes_bfloat16", lambda: False)
    assert Chosen.of(HealConfig(steps=1)) == Chosen(ADAMW, 1e-4)
    assert Chosen.of(asked) == Chosen(MUON, 2e-4)
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(HeadpruneError, match="needs torch 2.9 or newer"):
        Chosen.of(asked)
