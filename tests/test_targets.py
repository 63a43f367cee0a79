"""Plans for engines: what is chosen fits them, what cannot be is refused when the plan is made."""

import json
from dataclasses import replace

import pytest
import torch

import headprune
from headprune.config import ExportConfig, LayoutOption, Target
from headprune.errors import PlanError
from headprune.formats.export import FORMATS
from headprune.formats.source import open_source
from headprune.planning.constraints import constraints_of
from headprune.planning.kv_heads import Way, choose
from headprune.planning.targets import EVEN, HEAD_WINDOWS, LAYER_WINDOWS, SHAPES, TARGETS
from headprune.schemas.plan import Shape
from headprune.surgery.cut import cut_heads, resolve
from tests import tiny
from tests.cutting import ragged_plan, uneven_plan
from tests.test_cli import run, succeeds

TO = {
    Target.LLAMA_CPP: "gguf",
    Target.VLLM: "vllm",
    Target.ONNX: "onnx",
    Target.OPENVINO: "openvino",
}
PLANS = {
    "even": lambda model: evenly(model),
    "uneven": uneven_plan,
    "empty": lambda model: uneven_plan(model, 0, 2),
    "ragged": ragged_plan,
}
UNTIED = {"attention_bias": False, "tie_word_embeddings": False}
TIED = {"attention_bias": False, "tie_word_embeddings": True}
WHOLE = {"layer_types": ["full_attention"] * tiny.LAYERS}


def saved(folder, case="llama-gqa", worthless=()):
    """A model, with layers whose heads add nothing."""
    model = tiny.model(case)
    with torch.no_grad():
        for layer in worthless:
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
    return tiny.save(model, folder / "m")


def scored(model, **settings):
    folder = model.with_name("scores")
    headprune.score(model, output=folder, criterion=("magnitude",), **settings)
    return folder


def evenly(model):
    plan = uneven_plan(model)
    keep = {"keep": (0, 1), "scale": None}
    parts = {path: part.model_copy(update=keep) for path, part in plan.attentions.items()}
    return plan.model_copy(update={"attentions": parts})


def kept(plan):
    return [len(part.keep) for part in plan.attentions.values()]


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        ((), [0, 0, 6, 6]),
        (("onnx",), [0, 0, 6, 6]),
        (("llama.cpp",), [2, 0, 4, 6]),
        (("vllm",), [2, 2, 2, 6]),
        (("llama.cpp", "anywhere"), [4, 4, 4, 4]),
        (("anywhere",), [4, 4, 4, 4]),
    ],
)
def test_a_plan_fits_its_engine(targets, layers, tmp_path):
    """A layer that would get a zero head keeps its best head; even counts are the nearest."""
    model = saved(tmp_path, worthless=(0, 1))
    asked = {"scores": scored(model), "keep": 12, "targets": targets, "dry_run": True}
    plan = headprune.prune(model, **asked).plan
    if sum(layers) == 12:
        assert sorted(kept(plan)[2:]) == sorted(layers[2:]) and kept(plan)[:2] == layers[:2]
    else:
        assert kept(plan) == layers


def test_even_counts_divide_hidden_size(tmp_path):
    model = saved(tmp_path, "llama-mha")  # 6 heads; 5 do not divide 48, as 4 do
    asked = {"scores": scored(model), "keep": 19, "dry_run": True}
    found = headprune.prune(model, targets=["anywhere"], **asked)
    assert kept(found.plan) == [4, 4, 4, 4] and found.shape is Shape.NATIVE


def test_budgets_are_kept_to_evenly(tmp_path):
    model = saved(tmp_path)
    scores, free = scored(model), headprune.inspect(model)
    most = int(0.85 * free.parameters)
    made = headprune.prune(
        model, dry_run=True, scores=scores, max_params=most, targets=["anywhere"]
    )
    assert len(set(kept(made.plan))) == 1
    (spent,) = made.spent.values()
    assert spent[1] <= most
    with pytest.raises(PlanError, match="No plan with the same heads"):
        headprune.prune(model, dry_run=True, scores=scores, max_params=100, targets=["anywhere"])


@pytest.mark.parametrize(
    ("case", "config"), [("llama-gqa", {}), ("qwen3", UNTIED), ("qwen3", TIED), ("gemma2", WHOLE)]
)
def test_formats_refuse_the_shapes_that_plans_refuse(case, config, tmp_path):
    for shape, plan in PLANS.items():
        net = tiny.model(case)
        net.config.update({"sliding_window": None, **config})
        net.tie_weights()  # where the config says so
        cuts = resolve(plan(net), net, ragged=True)
        refused = {}
        for target in TO:
            try:
                constraints_of(net, LayoutOption.PER_LAYER, (target,)).check(cuts)
            except PlanError as error:
                refused[target] = str(error)
        cut_heads(net, cuts)
        net.save_pretrained(tmp_path / shape)
        source = open_source(tmp_path / shape)
        for target, form in TO.items():
            reason = FORMATS[form].refusal(source, ExportConfig(to=form))
            assert (target in refused) == (reason is not None), (shape, refused, reason)


def test_a_plan_that_an_engine_cannot_hold_is_refused(tmp_path, capsys):
    model, plan = saved(tmp_path), tmp_path / "plan.json"
    uneven_plan(headprune.from_pretrained(model)).model_copy(update={"model": None}).write(plan)
    line = ("prune", model, "--plan", plan, tmp_path / "out")
    code, _, err = run(capsys, *line, "--for", "anywhere")
    assert code == 2 and not (tmp_path / "out").exists()
    said = " ".join(err.split())
    assert "--for anywhere: the plan has" in said and "--for llama.cpp and vllm" in said
    assert run(capsys, *line, "--for", "llama.cpp", "--for", "vllm")[0] == 0


@pytest.mark.parametrize(
    ("case", "target", "message"),
    [
        ("bert-mlm", "llama.cpp", "its model_type is bert.*there are plans for onnx, openvino"),
        ("bert-mlm", "vllm", "generates no text"),
        ("vit", "onnx", "takes pixel_values"),
    ],
)
def test_a_model_that_an_engine_does_not_take_is_refused(case, target, message, tmp_path):
    tiny.model(case).save_pretrained(tmp_path / "m")
    (tmp_path / "plan.json").write_text("{}")
    asked = {"plan": tmp_path / "plan.json", "targets": [target], "dry_run": True}
    with pytest.raises(PlanError, match=f"--for {target}: .*{message}"):
        headprune.prune(tmp_path / "m", **asked)


def test_ragged_groups_are_refused_where_none_are_held(tmp_path):
    model = saved(tmp_path)
    asked = {"keep": 12, "layout": "ragged", "targets": ["anywhere"], "dry_run": True}
    with pytest.raises(PlanError, match="anywhere holds no ragged groups.*layout ragged"):
        headprune.prune(model, scores=scored(model), **asked)


def test_the_dry_run_shows_the_price_of_an_engine(tmp_path, capsys):
    model = saved(tmp_path, worthless=(0, 1))
    line = ("prune", model, "--scores", scored(model), "--keep", "12", "--dry-run", "--json")
    prices = []
    for engine in ("onnx", "llama.cpp"):
        out = succeeds(capsys, *line, "--for", engine)
        price, even = json.loads(out)["shapes"]
        assert (price["shape"], price["stored"]) == (engine, "runtime")
        assert (even["shape"], even["stored"]) == ("uniform", "native")
        prices.append(price["evidence"])
    assert prices[0] > prices[1] > even["evidence"]


def windowless():
    """A model that every engine takes."""
    net = tiny.model("mistral")
    net.config.update({"sliding_window": None})
    return net


def ways(cheap):
    """Of a module with 2 KV heads; one way costs nothing."""
    found = [
        Way((0, 1), ((0,), (1,)), 1.0),
        Way((1,), ((1,),), 1.0),
        Way((), (), 1.0),
        Way((0, 1), ((0, 1),), 0.5),
    ]
    return [replace(way, cost=0.0) if n == cheap else way for n, way in enumerate(found)]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("onnx", ["no attention", "1 kept", "no attention", "1 kept"]),
        ("llama.cpp", ["2 merged to 1", "1 kept", "no attention", "1 kept"]),
        ("vllm", ["2 merged to 1", "1 kept", "2 merged to 1", "1 kept"]),
        ("anywhere", ["2 merged to 1"] * 4),
    ],
)
def test_kv_heads_go_in_ways_that_the_engine_holds(target, said):
    constraints = constraints_of(windowless(), LayoutOption.PER_LAYER, (Target(target),))
    choices = {str(n): ways(cheap) for n, cheap in enumerate((2, 1, 2, 1))}
    budget = sum("no" not in one for one in said)
    found = choose(choices, budget, "x", constraints).chosen.values()
    assert [way.said for way in found] == said


def test_converted_for_an_engine(tmp_path, capsys):
    model, text = saved(tmp_path), tmp_path / "t.txt"
    text.write_text(tiny.text(4_000))
    line = f"convert-gqa {model} --kv-budget 0.5 --calibrate {text} --config seq_len=16"
    line = f"{line} --config calibration_tokens=256".split()
    out = succeeds(capsys, *line, "--dry-run", "--json")
    found = json.loads(out)
    assert found["even_cost"] > found["expected_cost"]
    succeeds(capsys, *line, "--for", "anywhere", tmp_path / "out")
    assert open_source(tmp_path / "out").config.num_key_value_heads == 1
    counts = ("convert-gqa", model, "--kv-heads", "3,1,1,1", tmp_path / "other")
    code, _, err = run(capsys, *counts, "--for", "anywhere")
    assert code == 2 and "--for anywhere needs the same number of KV heads" in " ".join(err.split())


@pytest.mark.slow
def test_compressed_for_an_engine(tmp_path):
    """Every candidate is one that the engine holds."""
    model, text = saved(tmp_path), tmp_path / "t.txt"
    text.write_text(tiny.text(3_000))
    small = {"seq_len": 16, "calibration_tokens": 256, "held_out_tokens": 128}
    asked = {"keep": 0.67, "targets": ["anywhere"], **small}
    made = headprune.compress(model, tmp_path / "out", data=[text], **asked)
    assert made.pruned.manifest.shape is Shape.NATIVE and not made.choice.left_out
    assert {one.kv_heads for one in made.choice.contenders} <= {4, 8}
    (tmp_path / "bert").mkdir()
    bert = saved(tmp_path / "bert", "bert-mlm")
    with pytest.raises(PlanError, match="its model_type is bert"):
        headprune.compress(bert, keep=0.5, dry_run=True, targets=["llama.cpp"])


def test_every_cell_is_filled_and_all_engines_hold_plain_configs():
    for engine in TARGETS.values():
        assert set(engine.cells) == set(SHAPES) and all(engine.cells.values())
        assert engine.cells[EVEN] == "yes"
    assert TARGETS[Target.ANYWHERE].holds(windowless()) == {EVEN, LAYER_WINDOWS}
    assert TARGETS[Target.VLLM].holds(windowless()) == {*SHAPES} - {HEAD_WINDOWS}
