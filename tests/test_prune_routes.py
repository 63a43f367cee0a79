"""Whatever decides a cut, gates, scores with a budget or a plan: every option has its effect."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import headprune
from tests import tiny


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model whose first layer hardly writes, and its scores by two criteria."""
    root = tmp_path_factory.mktemp("routes")
    net = tiny.model("llama-mha")
    with torch.no_grad():
        net.model.layers[0].self_attn.o_proj.weight.mul_(1e-3)
    tiny.save(net, root / "model")
    (root / "text.txt").write_text(tiny.text(2_000))
    sample = {"seq_len": 16, "calibration_tokens": 512, "seed": 7}
    criteria = ["magnitude", "compensated"]
    headprune.score(
        root / "model", root / "scores", data=root / "text.txt", criterion=criteria, **sample
    )
    return root


def cut(place, output, **given):
    """The result, its record, and the heads that each layer keeps."""
    given = {"criterion": "magnitude", "refit": "none", **given}
    done = headprune.prune(place / "model", output, scores=place / "scores", **given)
    made = json.loads((output / "headprune.json").read_text())
    return done, made, [len(part["query_heads"]) for part in made["layout"].values()]


BUDGETS = {"keep": {"keep": 0.5}, "params": {"max_params": 70_000}}


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_result_from_scores_names_them(budget, place, tmp_path):
    given = BUDGETS[budget]
    done, made, heads = cut(place, tmp_path / "out", **given, criterion="compensated")
    evidence, scored = (
        made["done"]["evidence"],
        json.loads((place / "scores" / "scores.json").read_text()),
    )
    assert (evidence["kind"], evidence["criterion"]) == ("scores", "compensated")
    assert (evidence["seed"], evidence["id"]) == (7, scored["id"])
    assert evidence.get("keep") == given.get("keep")
    assert any("assume that W_O is refitted" in warning for warning in done.warnings)
    assert sum(heads) < 24


def test_a_layer_keeps_a_head_where_an_engine_needs_one(place, tmp_path):
    _, _, free = cut(place, tmp_path / "free", keep=0.5)
    _, _, filled = cut(place, tmp_path / "filled", keep=0.5, targets="vllm")
    assert free[0] == 0 < filled[0] and sum(free) == sum(filled) == 12


@pytest.mark.parametrize("budget", [{"max_params": 70_000}, {"keep": 0.5}])
def test_a_layout_holds_under_any_budget(budget, place, tmp_path):
    _, made, heads = cut(place, tmp_path / "even", **budget, layout="uniform")
    _, _, free = cut(place, tmp_path / "free", **budget)
    assert len(set(heads)) == 1 < len(set(free))
    net = AutoModelForCausalLM.from_pretrained(tmp_path / "even")
    assert net.config.num_attention_heads == heads[0]
    assert net.num_parameters() <= budget.get("max_params", 10**9)
    shown = headprune.prune(
        place / "model", scores=place / "scores", **budget, layout="uniform", dry_run=True,
        criterion="magnitude"
    )  # fmt: skip
    assert [len(part.keep) for part in shown.plan.attentions.values()] == heads
    assert made["shape"] == "native"
