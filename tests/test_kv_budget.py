"""convert-gqa --kv-budget: what every layer keeps, merges or loses, within exactly the budget."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headprune
from headprune.errors import PlanError
from headprune.model.attention import attention_of
from headprune.model.heads import read_heads, write_heads
from headprune.planning.choose import CutRequest
from headprune.planning.kv_heads import Way, choose
from headprune.result.prune import prune
from headprune.result.verify import verify
from headprune.schemas.plan import AttentionPlan, Plan
from headprune.surgery.merges.budget import exactly
from headprune.tensors.units import Unit
from tests import tiny
from tests.marks import slow_unless

CASES = tiny.present("llama-gqa", "gpt2", "bert-mlm", "bert-base", "bart", "t5", "qwen3", "phi3")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text(tiny.text(3000))
    return tmp_path


def convert(model, **options):
    text = str(model.parent / "text.txt")
    settings = {"calibrate": text, "seq_len": 32, "calibration_tokens": 640, **options}
    return headprune.convert_gqa(str(model), **settings)


def planted(folder, noise=0.0):
    """A model whose layer 1 has equal KV heads, and whose layer 2 writes nothing."""
    model = tiny.model("llama-gqa")
    generator = torch.Generator().manual_seed(0)
    same, silent = attention_of(model)[1:3]

    def noisy(x):
        return x + noise * torch.randn(x.shape, generator=generator)

    heads = read_heads(same)
    equal = {
        name: noisy(getattr(heads, name)[:1].expand_as(getattr(heads, name)))
        for name in ("k", "v", "k_bias", "v_bias")
    }
    write_heads(same, replace(heads, **equal))
    heads = read_heads(silent)
    bias = None if heads.o_bias is None else noisy(torch.zeros_like(heads.o_bias))
    write_heads(silent, replace(heads, o=noisy(torch.zeros_like(heads.o)), o_bias=bias))
    tiny.save(model, folder / "model")
    return folder / "model"


def ways_of(result):
    return [way.said for way in result.planned.chosen.values()]


def test_what_costs_nothing_goes_first(folder):
    model = planted(folder)
    found = convert(model, kv_budget=7 / 12, dry_run=True)
    assert ways_of(found) == ["3 kept", "3 merged to 1", "no attention", "3 kept"]
    costs = [[way.cost for way in ways] for ways in found.planned.ways.values()]
    assert found.planned.cost < 1e-6 * max(map(max, costs))
    (folder / "noisy").mkdir()
    (folder / "noisy" / "text.txt").write_text(tiny.text(3000))
    other = convert(planted(folder / "noisy", noise=0.1), kv_budget=7 / 12, dry_run=True)
    assert other.planned.cost > 1e-3 * max(map(max, costs))


def test_a_layer_of_two_equal_kv_heads_loses_one_of_them(folder):
    """The others take over what a KV head says that another says as well."""
    model = tiny.model("llama-gqa")
    attention = attention_of(model)[0]
    heads = read_heads(attention)
    k, v, q = heads.affine("k"), heads.affine("v"), heads.affine("q")
    k[2], v[2], q[4:] = k[0].clone(), v[0].clone(), q[:2].clone()
    write_heads(attention, heads.with_affine("k", k).with_affine("v", v).with_affine("q", q))
    tiny.save(model, folder / "model")
    found = convert(folder / "model", kv_budget=11 / 12, dry_run=True)
    first = next(iter(found.planned.ways.values()))
    by_name = {way.said: way for way in first}
    assert ways_of(found) == ["2 kept", *["3 kept"] * 3]
    assert by_name["2 kept"].kept in ((0, 1), (1, 2))
    assert by_name["2 kept"].cost < 1e-3 * by_name["1 kept"].cost
    assert by_name["1 kept"].cost < by_name["no attention"].cost


@pytest.mark.parametrize("case", slow_unless({"llama-gqa", "gpt2"}.__contains__, CASES))
@pytest.mark.parametrize("share", slow_unless((0.25).__eq__, [0.75, 0.25]))
def test_a_budget_is_met_exactly_and_proven(case, share, folder):
    tiny.save(tiny.model(case), folder / "model")
    result = convert(folder / "model", kv_budget=share, output=str(folder / "out"))
    before, after = result.pruned.manifest.kv_heads
    assert after == round(share * before)
    model = headprune.from_pretrained(folder / "out")
    assert sum(a.kv_heads for a in attention_of(model)) == after
    assert verify(folder / "out").passed
    assert result.kv_heads == {
        path: (a.kv_heads, result.planned.chosen[path].kv_heads)
        for path, a in ((a.path, a) for a in attention_of(tiny.model(case)))
    }


@pytest.mark.parametrize("layout", ["per-layer", "ragged"])
def test_the_dry_run_is_what_the_conversion_does(layout, folder):
    tiny.save(tiny.model("llama-gqa"), folder / "model")
    some = {"kv_budget": 0.5, "layout": layout}
    shown = convert(folder / "model", **some, dry_run=True)
    assert not (folder / "out").exists()
    made = convert(folder / "model", **some, output=str(folder / "out"))
    assert made.planned.chosen == shown.planned.chosen
    told = json.loads(json.dumps(shown.as_json()))
    assert told["plan"]["attentions"] == made.pruned.plan.model_dump(mode="json")["attentions"]
    assert told["kv_heads"] == [12, 6]
    manifest = json.loads((folder / "out" / "headprune.json").read_text())
    assert manifest["done"]["ways"] == told["ways"]
    for way in told["ways"].values():
        assert set(way["others"]) | {way["way"]} == {
            *("3 kept", "2 kept", "1 kept", "no attention", "3 merged to 1")
        }


def test_what_leaves_nothing_to_choose_is_not_shown(folder):
    tiny.save(tiny.model("llama-gqa"), folder / "model")
    with pytest.raises(PlanError, match="give --kv-budget and --calibrate"):
        convert(folder / "model", kv_budget=0.5, merge="lowrank", dry_run=True)
    with pytest.raises(PlanError, match="give --kv-budget and --calibrate"):
        convert(folder / "model", kv_heads=1, dry_run=True)


def test_a_plan_that_only_removes_is_one_that_prune_takes(folder):
    """The two commands share the plan; what merges is refused by the one that cannot."""
    model = planted(folder)
    shown = convert(model, kv_budget=9 / 12, dry_run=True)
    assert shown.plan.merged == []
    assert prune(model, folder / "cut", CutRequest(plan=shown.plan)).plan == shown.plan
    merging = convert(model, kv_budget=7 / 12, dry_run=True)
    with pytest.raises(PlanError, match="merges KV heads"):
        prune(model, folder / "no", CutRequest(plan=merging.plan))


def test_cut_models_meet_a_budget_too(folder):
    tiny.save(tiny.model("llama-gqa"), folder / "model")
    parts = {}
    for layer, a in enumerate(attention_of(headprune.from_pretrained(folder / "model"))):
        keep = tuple(range([6, 0, 4, 2][layer]))
        parts[a.path] = AttentionPlan(query_heads=6, kv_heads=3, keep=keep)
    prune(
        folder / "model",
        folder / "cut",
        CutRequest(plan=Plan(unit=Unit.KV_GROUP, attentions=parts)),
    )
    convert(folder / "cut", kv_budget=0.5, output=str(folder / "out"))
    assert sum(a.kv_heads for a in attention_of(headprune.from_pretrained(folder / "out"))) == 3
    assert verify(folder / "out").passed


def test_no_kv_head_at_all_is_no_budget(folder):
    tiny.save(tiny.model("llama-gqa"), folder / "model")
    with pytest.raises(PlanError, match="keeps none of 12 KV heads; the least is one, 0.083"):
        convert(folder / "model", kv_budget=0.01, dry_run=True)


@given(
    st.lists(
        st.dictionaries(st.integers(0, 4), st.floats(0, 1), min_size=1, max_size=4), max_size=4
    ),
    st.integers(0, 12),
)
def test_the_programme_is_as_good_as_force(costs, budget):
    totals = {
        choice: sum(c[n] for c, n in zip(costs, choice, strict=True))
        for choice in itertools.product(*costs)
    }
    meet = [cost for choice, cost in totals.items() if sum(choice) == budget]
    if meet:
        found = exactly(costs, budget)
        assert sum(found) == budget
        assert totals[tuple(found)] == pytest.approx(min(meet))
    else:
        with pytest.raises(ValueError, match=f"{budget} KV heads, which no choice comes to"):
            exactly(costs, budget)


def test_a_budget_that_nothing_meets_names_the_nearest():
    ways = {
        path: [Way((0, 1, 2), ((0,), (1,), (2,)), 0.0), Way((0, 1, 2), ((0, 1, 2),), 1.0)]
        for path in ("a", "b")
    }
    assert [way.said for way in choose(ways, 4, "x").chosen.values()].count("3 merged to 1") == 1
    with pytest.raises(PlanError, match="--kv-budget 0.5 asks for 3 KV heads.*nearest: 2 and 4"):
        choose(ways, 3, "--kv-budget 0.5")


def test_of_ways_to_one_number_the_cheapest_counts():
    removed, merged = Way((0,), ((0,),), 2.0), Way((0, 1), ((0, 1),), 1.0)
    whole = Way((0, 1), ((0,), (1,)), 0.0)
    assert choose({"a": [whole, removed, merged]}, 1, "x").chosen["a"] is merged
    cheaper = replace(removed, cost=0.5)
    assert choose({"a": [whole, cheaper, merged]}, 1, "x").chosen["a"] is cheaper


def test_measuring_leaves_the_weights_alone(folder, monkeypatch):
    """A conversion that is proven against weights that the measuring has changed proves nothing."""
    from headprune.result import opened

    tiny.save(tiny.model("llama-gqa"), folder / "model")
    seen = []
    plan = opened.plan_kv_heads

    def spied(model, *arguments):
        seen.append((model, {name: p.clone() for name, p in model.named_parameters()}))
        return plan(model, *arguments)

    monkeypatch.setattr(opened, "plan_kv_heads", spied)
    convert(folder / "model", kv_budget=0.5, dry_run=True)
    ((model, before),) = seen
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
