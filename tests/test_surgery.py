"""Gate = slice = reloaded, for every family, layout, attention implementation and dtype."""

import json
from itertools import product

import pytest
import torch

import headprune
from headprune.errors import FamilyError, PlanError, ProofError
from headprune.model import probes
from headprune.model.attention import attention_of, fingerprint
from headprune.model.units import default_unit, unit_sizes
from headprune.planning.from_scores import plan_keeping
from headprune.proof import equivalence
from headprune.result import write as writing
from headprune.schemas.plan import AttentionPlan, Plan, Shape, read_plan
from headprune.surgery.cut import cut_heads, resolve, result_shape, uncut
from headprune.tensors.selection import keep_best
from headprune.tensors.units import Unit
from tests import tiny
from tests.cutting import expecting, prove, uneven_plan
from tests.marks import slow_unless


@pytest.mark.parametrize("empty", [(), (0,), (-1,)], ids=["none", "first", "last"])
@pytest.mark.parametrize(
    ("attn", "dtype"),
    slow_unless(
        lambda attn, dtype: (attn, dtype) == ("eager", torch.float32),
        product(["eager", "sdpa"], [torch.float32, torch.float64]),
    ),
)
@pytest.mark.parametrize("case", tiny.CASES)
def test_gated_is_cut_is_reloaded(case, dtype, attn, empty, tmp_path):
    model = tiny.model(case, dtype, attn)
    cuts = resolve(uneven_plan(model, *empty), model)
    result = prove(model, cuts, tmp_path)
    assert result.passed
    assert result.control is not None and result.control > 1e3 * result.tolerance


def test_rounding_is_measured_on_every_output_that_is_compared(monkeypatch):
    model = tiny.model("llama-gqa")
    cuts = [uncut(attention) for attention in attention_of(model)]
    plain = equivalence.expect(model, cuts)
    assert 0 < plain.rounding.outputs < 1e-5
    assert all(0 < rounding < 1e-5 for rounding in plain.rounding.modules.values())

    def shaken(model, inputs):
        logits = decoded(model, inputs)
        return logits + 1e-2 * (logits * 2**22).sin()

    decoded = probes._decoded_in_chunks
    monkeypatch.setattr(probes, "_decoded_in_chunks", shaken)
    assert equivalence.expect(model, cuts).rounding.outputs > 100 * plain.rounding.outputs


def test_what_is_clear_before_the_work_takes_four_passes(monkeypatch):
    model, passes = tiny.model("llama-gqa"), list[int]()
    plan = uneven_plan(model)
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    writing._refuse_unprovable(model, plan)
    assert len(passes) == 4
    monkeypatch.setattr(writing, "_ROUNDING_FACTOR", 1e9)
    writing._refuse_unprovable(model, plan)
    assert len(passes) == 4 + 4 + 31


def test_a_proof_that_rounding_hides_is_none():
    values = ([1.0, 2.0], [1.0, 2.0001], [2.0, 1.0])
    wanted, near, other = (probes.Outputs(logits=torch.tensor(each)) for each in values)
    with pytest.raises(ProofError, match="differ by 4.99e-05"):
        equivalence.conclude(expecting(wanted, other), near)
    amplified = equivalence.conclude(expecting(wanted, other, rounding=2e-5), near)
    assert amplified.tolerance == 8e-5
    hidden = expecting(wanted, other, rounding=0.1)
    with pytest.raises(ProofError, match="would show nothing.*in float64"):
        hidden.refuse_inconclusive()
    assert amplified.passed and not expecting(wanted, other, rounding=2e-5).inconclusive()
    assert expecting(wanted, other, rounding=2e-5).inconclusive(rounding_factor=1e3)
    with pytest.raises(ProofError, match="would show nothing"):
        equivalence.conclude(hidden, near)


def test_the_proof_fails_on_nan():
    good = probes.Outputs(logits=torch.ones(2, 3))
    bad = probes.Outputs(logits=torch.tensor([[1.0, float("nan"), 1.0], [1.0, 1.0, 1.0]]))
    with pytest.raises(ProofError):
        equivalence.conclude(expecting(good), bad)


@pytest.mark.parametrize("case", ["llama-gqa", "gpt2"])
@pytest.mark.parametrize("empty", [(), (0,), (-1,)], ids=["none", "first", "last"])
def test_generate_with_cache_gives_the_tokens_of_no_cache(case, empty):
    model = tiny.model(case)
    cut_heads(model, resolve(uneven_plan(model, *empty), model))
    prompt = torch.tensor([[7, 8, 9, 10, 11, 12, 13]])
    options = {"max_new_tokens": 12, "do_sample": False}
    cached = model.generate(prompt, use_cache=True, **options)
    assert cached.tolist() == model.generate(prompt, use_cache=False, **options).tolist()
    static = model.generate(prompt, cache_implementation="static", **options)
    assert static.tolist() == cached.tolist()
    beams = model.generate(prompt, num_beams=3, **options)
    assert (
        beams.tolist() == model.generate(prompt, num_beams=3, use_cache=False, **options).tolist()
    )


def budgets(total):
    return [0, 1, total - 1, total]


@pytest.mark.parametrize("case", ["llama-gqa", "gpt2", "bert-mlm"])
@pytest.mark.parametrize("which", range(4))
def test_budgets_none_one_all_but_one_and_all(case, which, tmp_path):
    model = tiny.model(case)
    attentions = attention_of(model)
    unit = default_unit(attentions)
    sizes = unit_sizes(attentions, unit)
    budget = budgets(len(sizes))[which] * sizes[0]
    plan = plan_keeping(attentions, unit, keep_best([0.0] * len(sizes), sizes, budget))  # all tied
    assert plan.kept_heads == budget
    assert prove(model, resolve(plan, model), tmp_path).passed
    assert sum(a.query_heads for a in attention_of(model)) == budget


def test_a_uniform_cut_of_llama_is_a_plain_llama(tmp_path):
    model = tiny.model("llama-gqa")
    attentions = attention_of(model)
    keep = [(0, 1, 2, 3), (2, 3, 4, 5), (0, 1, 4, 5), (0, 1, 2, 3)]  # other heads, equal counts
    parts = {
        a.path: AttentionPlan(query_heads=6, kv_heads=3, keep=k)
        for a, k in zip(attentions, keep, strict=True)
    }
    cuts = resolve(Plan(unit=Unit.KV_GROUP, attentions=parts), model)
    assert prove(model, cuts, tmp_path).passed
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    assert config["head_dim"] == 10
    assert not {"auto_map", "headprune", "per_layer_config"} & set(config)
    assert not list(tmp_path.glob("*.py"))


def test_query_slots_keep_groups_equal_and_kv_heads_whole(tmp_path):
    model = tiny.model("llama-gqa")
    attentions = attention_of(model)
    sizes = unit_sizes(attentions, Unit.QUERY_SLOT)
    scores = [float(i % 3) for i in range(len(sizes))]
    plan = plan_keeping(attentions, Unit.QUERY_SLOT, keep_best(scores, sizes, 5 * 3))
    assert prove(model, resolve(plan, model), tmp_path).passed
    assert {a.kv_heads for a in attention_of(model)} <= {0, 3}


def test_ragged_groups_are_refused_when_planned():
    model = tiny.model("llama-gqa")
    parts = {
        a.path: AttentionPlan(query_heads=6, kv_heads=3, keep=(0, 1, 2))
        for a in attention_of(model)
    }
    plan = Plan(unit=Unit.HEAD, attentions=parts)
    with pytest.raises(PlanError, match="2, 1 query heads each.*--unit kv-group"):
        resolve(plan, model)
    assert resolve(plan, model, ragged=True)


def test_ids_stay_those_of_the_original_in_a_second_cut(tmp_path):
    model = tiny.model("gpt2")
    first = {a.path: [0, 2] for a in attention_of(model)[:2]}
    (tmp_path / "a.json").write_text(json.dumps(first))

    def present():
        return {a.path: (a.query_ids, a.kv_heads) for a in attention_of(model)}

    cut_heads(model, resolve(read_plan(tmp_path / "a.json", present()), model))
    assert attention_of(model)[0].query_ids == (1, 3, 4, 5)
    (tmp_path / "b.json").write_text(json.dumps({attention_of(model)[0].path: [3]}))
    assert prove(model, resolve(read_plan(tmp_path / "b.json", present()), model), tmp_path).passed
    assert attention_of(model)[0].query_ids == (1, 4, 5)
    assert attention_of(headprune.from_pretrained(tmp_path))[0].query_ids == (1, 4, 5)
    (tmp_path / "c.json").write_text(json.dumps({attention_of(model)[0].path: [3]}))
    with pytest.raises(PlanError, match=r"head 3 of .* 1, 4, 5"):
        read_plan(tmp_path / "c.json", present())


def test_the_fingerprint_knows_the_model_in_any_dtype():
    model = tiny.model("gpt2", torch.bfloat16)
    mark = fingerprint(attention_of(model))
    assert fingerprint(attention_of(model.float())) == mark
    with torch.no_grad():
        attention_of(model)[0].output_projection.weight[0, 0] += 1
    assert fingerprint(attention_of(model)) != mark


def test_a_plan_of_another_model_is_refused():
    plan = uneven_plan(tiny.model("llama-gqa"))
    other = tiny.model("llama-gqa")
    with torch.no_grad():
        attention_of(other)[0].output_projection.weight.mul_(2)
    with pytest.raises(PlanError, match="was made for 'tiny'.*Give the model it was made for"):
        resolve(plan, other)


def test_an_unknown_family_is_named():
    model = tiny.model("gpt2")
    model.config.__class__ = type("X", (type(model.config),), {"model_type": "gpt3"})
    with pytest.raises(FamilyError, match="Model type 'gpt3' is not in headprune's table"):
        attention_of(model)


def test_a_refused_setting_is_named_with_its_reason():
    model = tiny.model("gpt2")
    model.config.add_cross_attention = True
    with pytest.raises(FamilyError, match="add_cross_attention=True: cross attention"):
        attention_of(model)


def test_native_is_told_from_runtime():
    for case, expected in (("llama-mha", Shape.NATIVE), ("gpt2", Shape.RUNTIME)):
        model = tiny.model(case)
        parts = {
            a.path: AttentionPlan(query_heads=6, kv_heads=6, keep=(1, 2, 5))
            for a in attention_of(model)
        }
        assert cut_heads(model, resolve(Plan(unit=Unit.HEAD, attentions=parts), model)) is expected


def test_a_count_that_the_config_refuses_goes_by_the_runtime(tmp_path):
    model = tiny.model("llama-mha")
    hidden = model.config.hidden_size
    for count, shape in ((5, Shape.RUNTIME), (4, Shape.NATIVE)):
        assert (hidden % count == 0) == (shape is Shape.NATIVE)
        model = tiny.model("llama-mha")
        parts = {
            a.path: AttentionPlan(query_heads=6, kv_heads=6, keep=tuple(range(count)))
            for a in attention_of(model)
        }
        cuts = resolve(Plan(unit=Unit.HEAD, attentions=parts), model)
        assert result_shape(cuts, model.config) is shape
        assert prove(model, cuts, tmp_path / str(count)).passed
