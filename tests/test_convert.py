"""convert-gqa and heal: merged = converted = reloaded, smaller caches, what is refused."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import headprune
from headprune import devices
from headprune.config import (
    ConvertConfig,
    DataConfig,
    Grouping,
    HealConfig,
    HealObjective,
    HealTrain,
    LayoutOption,
    Resuming,
)
from headprune.context import Context
from headprune.distillation import heal as heal_module
from headprune.distillation.heal import heal
from headprune.errors import CheckpointError, DataError, HeadpruneError, PlanError, ProofError
from headprune.family import FAMILIES
from headprune.model import probes
from headprune.model.attention import attention_of
from headprune.model.heads import read_heads, write_heads
from headprune.planning.choose import CutRequest
from headprune.proof import equivalence
from headprune.result import convert_gqa as conversion
from headprune.result.convert_gqa import convert_gqa
from headprune.result.prune import prune
from headprune.result.verify import verify
from headprune.schemas.plan import AttentionPlan, Plan, Shape, read_plan
from headprune.schemas.records import Merging
from headprune.surgery.cut import cut_heads, resolve
from headprune.surgery.merges import MERGES
from headprune.surgery.sharpness import larger_queries
from headprune.tensors.units import Unit
from tests import tiny
from tests.cutting import expecting, ragged_plan
from tests.marks import slow_unless

TEXT_TOKENS = 640


def _sharable(case):
    family = FAMILIES[tiny.family_of_case(case)]
    own_norms = case in ("stablelm-qk_norm", "cohere")  # a norm of its own per KV head
    shares = family.fewer_kv_heads in ("native", "runtime")
    return shares and tiny.kv_heads(case) > 1 and not own_norms


SHARING = [case for case in tiny.FAMILY_CASES if _sharable(case)]
DEEPLY = ("llama-mha", "gpt2", "bert-mlm", "qwen3")
LISTENING = tiny.present(
    *("llama-mha", "llama-gqa", "gpt2", "bert-mlm", "bart", "t5", "gpt_neox", "opt", "whisper"),
    *("qwen3", "gemma3_text", "phi", "cohere2", "glm", "gpt_oss", "modernbert"),
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text(tiny.text(3000))
    return tmp_path


def saved(case, folder):
    return str(tiny.save(tiny.model(case), folder / "model"))


def convert(folder, case, kv_heads=1, **options):
    """Converts a tiny model; lowrank gets text to calibrate on."""
    model = folder / "model"
    if not model.exists():
        saved(case, folder)
    keys = ("layout", "output")
    others = {key: options.pop(key) for key in keys if key in options}
    settings = {"kv_heads": kv_heads, "seq_len": 32, "calibration_tokens": TEXT_TOKENS, **options}
    text = DataConfig(source=str(folder / "text.txt"))
    calibrate = text if options.get("merge") == "lowrank" else None
    output = others.pop("output", folder / "out")
    return convert_gqa(str(model), output, ConvertConfig(**settings), calibrate, **others)


def outputs(model):
    return probes.probe(model, probes.probe_inputs(model))


@pytest.mark.parametrize("case", slow_unless(tiny.one_per_layout(SHARING).__contains__, SHARING))
def test_every_family_that_can_shares_kv_heads(case, folder):
    before = tiny.kv_heads(case)
    count = 2 if before == 6 else 1
    result = convert(folder, case, count, merge="procrustes")
    measured = result.pruned.manifest.proof
    assert measured.control > 1e2 * measured.tolerance
    reloaded = headprune.from_pretrained(folder / "out")
    assert {a.kv_heads for a in attention_of(reloaded)} == {count}
    native = FAMILIES[tiny.family_of_case(case)].fewer_kv_heads == "native"
    native = native and case != "phi-qk_norm"  # whose norms are as wide as the config says
    assert (result.pruned.manifest.shape is Shape.NATIVE) is native
    # a K head that is another's: the stored sample must notice
    attention = attention_of(reloaded)[0]
    heads = read_heads(attention)
    write_heads(attention, replace(heads, v=heads.v.flip(1)))
    wanted = result.pruned.manifest.probe
    assert equivalence.difference_from_stored(wanted, outputs(reloaded)) > 1e2 * measured.tolerance


DECODERS = [case for case in SHARING if tiny.task(case) == "causal-lm"]


@pytest.mark.parametrize("case", slow_unless(tiny.one_per_layout(DECODERS).__contains__, DECODERS))
def test_a_live_cache_holds_every_shared_head_once(case, folder):
    before = tiny.kv_heads(case)
    convert(folder, case, before // 3, merge="mean")
    model = headprune.from_pretrained(folder / "out")
    ids = probes.probe_inputs(model)["input_ids"][:1]
    cache = model(ids, past_key_values=DynamicCache(), use_cache=True).past_key_values
    assert {layer.keys.shape[1] for layer in cache.layers} == {before // 3}
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": 9, "do_sample": False}
    uncached = model.generate(ids, use_cache=False, **options).tolist()
    assert model.generate(ids, **options).tolist() == uncached
    if model._can_compile_fullgraph:  # those that take a static cache
        static = model.generate(ids, cache_implementation="static", **options)
        assert static.tolist() == uncached


@pytest.mark.parametrize("case", tiny.present("bart", "whisper", "t5"))
def test_encoder_decoders_generate_with_shared_heads(case, folder):
    convert(folder, case, 2, merge="mean")
    model = headprune.from_pretrained(folder / "out")
    model.generation_config.eos_token_id = None
    inputs = dict(probes.probe_inputs(model))
    inputs.pop("decoder_input_ids")
    options = {**inputs, "decoder_start_token_id": 2, "max_new_tokens": 9, "do_sample": False}
    uncached = model.generate(**options, use_cache=False).tolist()
    assert model.generate(**options).tolist() == uncached
    beams = model.generate(**options, num_beams=2, use_cache=False).tolist()
    assert model.generate(**options, num_beams=2).tolist() == beams
    cache = model(**probes.probe_inputs(model), use_cache=True).past_key_values
    for part in (cache.self_attention_cache, cache.cross_attention_cache):
        assert {layer.keys.shape[1] for layer in part.layers} == {2}


@pytest.mark.parametrize("case", slow_unless(DEEPLY.__contains__, LISTENING))
def test_lowrank_leaves_more_than_the_mean_does(case, folder):
    model = tiny.model(case)
    count = 1 if attention_of(model)[0].kv_heads == 3 else 2
    if case == "whisper":  # hears sound
        saved(case, folder)
        with pytest.raises(HeadpruneError, match="text"):
            convert(folder, case, count, merge="lowrank")
        return
    ids = probes.probe_inputs(model)
    wanted = probes.probe(model, ids)

    def gap(merge):
        convert(folder, case, count, merge=merge, output=folder / merge)
        got = probes.probe(headprune.from_pretrained(folder / merge), ids)
        name = next(iter(wanted))
        return float((got[name] - wanted[name]).norm() / wanted[name].norm())

    assert gap("lowrank") < 0.9 * gap("mean")


MERGED = [(case, merge) for case in DEEPLY for merge in MERGES]
MERGED += [(case, "mean") for case in SHARING if case not in DEEPLY]
LAYOUTS = {*DEEPLY, *tiny.one_per_layout(SHARING)}


@pytest.mark.parametrize(
    ("case", "merge"),
    slow_unless(
        # of other layouts the cheapest merge, and the one that calibrates
        lambda case, merge: (
            case == "llama-mha" or (case in LAYOUTS and merge in ("mean", "lowrank"))
        ),
        MERGED,
    ),
)
def test_identical_heads_merge_without_a_trace(case, merge, folder):
    model = tiny.model(case)
    for attention in attention_of(model):
        heads = read_heads(attention)
        k, v = heads.affine("k").clone(), heads.affine("v").clone()
        k[:], v[:] = k[:1].clone(), v[:1].clone()
        write_heads(attention, heads.with_affine("k", k).with_affine("v", v))
    tiny.save(model, folder / "model")
    wanted = outputs(headprune.from_pretrained(folder / "model"))
    convert(folder, case, 1, merge=merge)
    got = outputs(headprune.from_pretrained(folder / "out"))
    # lowrank solves systems in float32
    assert equivalence.difference(wanted, got) < (2e-3 if merge == "lowrank" else 1e-5)


@pytest.mark.parametrize("merge", ["mean", "lowrank"])
def test_as_many_kv_heads_as_there_are_is_the_model_itself(merge, folder):
    result = convert(folder, "llama-gqa", 3, merge=merge)
    original = headprune.from_pretrained(folder / "model")
    converted = headprune.from_pretrained(folder / "out")
    assert equivalence.difference(outputs(original), outputs(converted)) == 0
    assert result.pruned.manifest.shape is Shape.NATIVE


def test_a_plain_config_loads_in_the_stock_class_without_headprune(folder):
    convert(folder, "llama-mha", 2, merge="lowrank", grouping=Grouping.SIMILAR)
    config = json.loads((folder / "out" / "config.json").read_text())
    assert config["num_key_value_heads"] == 2
    assert not {"headprune", "auto_map", "per_layer_config"} & set(config)
    stock = AutoModelForCausalLM.from_pretrained(folder / "out")
    wanted = outputs(headprune.from_pretrained(folder / "out"))
    assert equivalence.difference(wanted, outputs(stock.eval())) == 0


@pytest.mark.process
@pytest.mark.slow
def test_uneven_results_load_where_headprune_is_not_installed(folder):
    convert(folder, "gpt_neox", (6, 3, 2, 1), merge="mean")
    wanted = outputs(headprune.from_pretrained(folder / "out"))["logits"]
    torch.save(wanted, folder / "wanted.pt")
    code = (
        "import sys, torch\n"
        "sys.modules['headprune'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        f"m = AutoModelForCausalLM.from_pretrained({str(folder / 'out')!r}, "
        "trust_remote_code=True).eval()\n"
        f"wanted = torch.load({str(folder / 'wanted.pt')!r})\n"
        "g = torch.Generator().manual_seed(20190523)\n"
        f"ids = torch.randint(0, {tiny.VOCAB}, (2, 24), generator=g)\n"
        "got = m(ids).logits.double()\n"
        "assert (got - wanted)[0].abs().max() < 1e-5 * wanted.abs().max()\n"
        "print('loaded')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "loaded" in done.stdout, done.stderr


@pytest.mark.parametrize("case", ["gpt2", "gpt2-classifier"])
def test_gpt2_with_one_kv_head_is_a_gpt_big_code(case, folder):
    result = convert(folder, case, 1, merge="mean", layout=LayoutOption.UNIFORM)
    assert result.pruned.manifest.shape is Shape.NATIVE
    config = json.loads((folder / "out" / "config.json").read_text())
    assert config["model_type"] == "gpt_bigcode"
    assert config["multi_query"] is True
    assert "auto_map" not in config
    if case == "gpt2":
        text = DataConfig(source=str(folder / "text.txt"))
        settings = HealConfig(steps=8, seq_len=16, learning_rate=5e-3)
        healed = heal(folder / "out", folder / "model", text, folder / "healed", settings)
        assert healed.after < healed.before


def test_the_order_of_heads_does_not_matter(folder):
    model = tiny.model("llama-mha")
    tiny.save(model, folder / "model")
    order = [4, 2, 0, 5, 1, 3]
    for attention in attention_of(model):
        heads = read_heads(attention)
        shuffled = {role: getattr(heads, role)[order] for role in "qkvo"}
        biases = {f"{r}_bias": getattr(heads, f"{r}_bias")[order] for r in "qkv"}
        write_heads(attention, replace(heads, **shuffled, **biases))
    (folder / "other").mkdir()
    (folder / "other" / "text.txt").write_text(tiny.text(3000))
    tiny.save(model, folder / "other" / "model")
    found = []
    for place in (folder, folder / "other"):
        convert(place, "llama-mha", 3, merge="procrustes", grouping=Grouping.SIMILAR)
        found.append(outputs(headprune.from_pretrained(place / "out")))
    assert equivalence.difference(*found) < 1e-4
    convert(folder / "other", "", 3, merge="mean", output=folder / "adjacent")
    assert (
        equivalence.difference(found[0], outputs(headprune.from_pretrained(folder / "adjacent")))
        > 0.1
    )


def test_only_the_kinds_that_are_named_are_converted(folder):
    convert(folder, "bart", 2, merge="mean", attention=("decoder",))
    model = headprune.from_pretrained(folder / "out")
    assert {(a.kind, a.kv_heads) for a in attention_of(model)} == {
        ("encoder", 6),
        ("decoder", 2),
        ("cross", 6),
    }


@pytest.mark.parametrize(
    ("case", "first"),
    slow_unless(
        lambda case, first: (first == "convert") is (case == "bert-mlm"),
        product(["llama-mha", "bert-mlm", "gpt2"], ["prune", "convert"]),
    ),
)
def test_cutting_and_converting_compose(first, case, folder):
    model = saved(case, folder)

    def cut(source, output):
        net = headprune.from_pretrained(source)
        parts = {}
        for a in attention_of(net):
            size = a.query_heads // a.kv_heads
            kept = tuple(sorted(a.query_ids[: a.query_heads - max(size, 2)]))
            parts[a.path] = AttentionPlan(query_heads=a.query_heads, kv_heads=a.kv_heads, keep=kept)
        prune(source, output, CutRequest(plan=Plan(unit=Unit.KV_GROUP, attentions=parts)))

    text = ConvertConfig(kv_heads=2, merge="mean")
    if first == "prune":
        cut(model, folder / "cut")
        convert_gqa(folder / "cut", folder / "both", text)
    else:
        convert_gqa(model, folder / "shared", text)
        cut(str(folder / "shared"), folder / "both")
    lineage = json.loads((folder / "both" / "headprune.json").read_text())["lineage"]
    assert len(lineage) == 1
    left = attention_of(headprune.from_pretrained(folder / "both"))
    assert {(a.query_heads, a.kv_heads) for a in left} == {(4, 2) if first == "prune" else (3, 1)}
    assert verify(folder / "both").passed


def test_a_plan_that_merges_is_refused_where_heads_are_cut(folder):
    """Else it would be cut without a merge, which its proof would refuse after all the work."""
    model = saved("llama-mha", folder)
    convert(folder, "llama-mha", 2, merge="procrustes")
    file = folder / "out" / "plan.json"
    assert read_plan(file, {}).merge == "procrustes"
    with pytest.raises(PlanError, match=r"merges KV heads \(by procrustes\).*--kv-heads 2,2,2,2"):
        prune(model, folder / "cut", CutRequest(plan=file))
    assert not (folder / "cut").exists()
    content = json.loads(file.read_text())
    for part in content["attentions"].values():
        del part["groups"]
    file.write_text(json.dumps({**content, "merge": None}))
    assert prune(model, folder / "cut", CutRequest(plan=file)).plan.merged == []


AGAIN = tiny.present("llama-mha", "bert-mlm", "gpt2", "opt", "t5", "gpt_neox")


@pytest.mark.parametrize(
    ("case", "merge"),
    slow_unless(
        lambda case, merge: (merge == "procrustes") is (case == "gpt2") and case in DEEPLY,
        product(AGAIN, ["procrustes", "lowrank"]),
    ),
)
def test_what_was_converted_can_be_converted_again(case, merge, folder):
    convert(folder, case, 3, merge=merge)
    text = DataConfig(source=str(folder / "text.txt"))
    config = ConvertConfig(kv_heads=1, merge=merge, seq_len=32, calibration_tokens=TEXT_TOKENS)
    convert_gqa(folder / "out", folder / "again", config, text)
    again = headprune.from_pretrained(folder / "again")
    assert {a.kv_heads for a in attention_of(again)} == {1}


@pytest.mark.parametrize(
    ("case", "merge"),
    slow_unless(
        lambda case, merge: (merge == "mean") is (case == "llama-mha"),
        product(["llama-mha", "phi3", "bert-mlm"], ["mean", "lowrank"]),
    ),
)
def test_cut_models_with_uneven_and_empty_layers_convert(case, merge, folder):
    model = saved(case, folder)
    parts = {}
    for layer, a in enumerate(attention_of(headprune.from_pretrained(model))):
        groups = a.kv_heads - (a.kv_heads // 3) * (layer % 2)
        keep = tuple(range(groups * (a.query_heads // a.kv_heads))) if layer != 1 else ()
        parts[a.path] = AttentionPlan(query_heads=a.query_heads, kv_heads=a.kv_heads, keep=keep)
    prune(model, folder / "cut", CutRequest(plan=Plan(unit=Unit.KV_GROUP, attentions=parts)))
    text = DataConfig(source=str(folder / "text.txt"))
    config = ConvertConfig(kv_heads=1, merge=merge, seq_len=32, calibration_tokens=TEXT_TOKENS)
    convert_gqa(folder / "cut", folder / "out", config, text)
    converted = headprune.from_pretrained(folder / "out")
    assert [a.kv_heads for a in attention_of(converted)][:3] == [1, 0, 1]


def test_a_budget_in_a_plain_config_is_the_same_for_all_layers(folder):
    result = convert(folder, "llama-mha", None, kv_budget=0.5, layout=LayoutOption.UNIFORM)
    assert {count for _, count in result.kv_heads.values()} == {3}
    assert result.pruned.manifest.shape is Shape.NATIVE


REFUSED = {
    "more": ("llama-gqa", {"kv_heads": 6}, "fewer than 6"),
    "no divisor": ("llama-mha", {"kv_heads": 4}, "4 does not divide.*Possible: 1, 2, 3, 6"),
    "latent": ("deepseek_v3", {"kv_heads": 1}, "share one latent"),
    "one already": ("llama-mqa", {"kv_heads": 1}, "one KV head per layer already"),
    "list too short": ("llama-mha", {"kv_heads": (2, 2)}, "lists 2 numbers; the model has 4"),
    "native bert": (
        "bert-mlm",
        {"kv_heads": 2, "layout": LayoutOption.UNIFORM},
        "no setting for the number of KV heads",
    ),
    "native uneven": (
        "llama-mha",
        {"kv_heads": (1, 2, 2, 2), "layout": LayoutOption.UNIFORM},
        "the same number of KV heads in every layer",
    ),
    "no text": ("llama-mha", {"kv_heads": None, "kv_budget": 0.5}, "give --calibrate DATA"),
    "a merge": (
        "llama-mha",
        {"kv_heads": None, "kv_budget": 0.5, "merge": "lowrank"},
        "and no --merge, or --layout uniform",
    ),
    "own norms": ("cohere", {"kv_heads": 1}, "norm with weights of its own"),
    "no interface": ("gptj", {"kv_heads": 2, "merge": "lowrank"}, "attention interface"),
    "shared layer": ("albert", {"kv_heads": 2, "merge": "lowrank"}, "more than one layer"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_is_refused_in_a_sentence(why, folder):
    case, options, message = REFUSED[why]
    if not tiny.present(case):
        pytest.skip(f"this transformers has no {case}")
    with pytest.raises(PlanError, match=message):
        convert(folder, case, **options)
    assert not (folder / "out").exists()


def test_calibration_text_that_is_too_short_says_how_much_is_needed(folder):
    (folder / "text.txt").write_text(tiny.text(40))
    with pytest.raises(DataError, match="32 tokens; at least 48 are needed"):
        convert(folder, "llama-mha", 2, merge="lowrank")
    assert not (folder / "out").exists()


def test_a_wrong_share_fails_the_proof(folder):
    model = tiny.model("llama-mha")  # its heads differ, so that sharing them changes it
    parts = {
        a.path: AttentionPlan(
            query_heads=6, kv_heads=6, keep=tuple(range(6)), groups=((0, 1, 2), (3, 4, 5))
        )
        for a in attention_of(model)
    }
    cuts = resolve(Plan(unit=Unit.KV_GROUP, attentions=parts), model)
    inputs = probes.probe_inputs(model)
    wanted = equivalence.probe_gated(model, cuts, inputs)
    cut_heads(model, cuts)
    got = probes.probe(model, inputs)
    with pytest.raises(ProofError, match="differ by"):
        equivalence.conclude(expecting(wanted), got)


def healing(folder, output="healed", **options):
    settings = {"steps": 12, "batch_size": 4, "seq_len": 16, "learning_rate": 5e-3}
    settings |= {"objective": HealObjective.DISTILL, **options}  # no teacher here knows a text
    rerun = Resuming(resume=settings.pop("resume", False))
    context = Context(**({"step": settings.pop("step")} if "step" in settings else {}))
    text, places = DataConfig(source=str(folder / "text.txt")), (folder / "out", folder / "model")
    return heal(*places, text, folder / output, HealConfig(**settings), rerun, context)


@pytest.mark.parametrize(
    ("hardware", "asked", "rounded"),
    slow_unless(
        lambda hardware, asked, rounded: hardware,
        [(True, True, True), (True, False, False), (False, True, False)],
    ),
)
def test_healing_computes_in_bfloat16_where_the_device_has_it(
    hardware, asked, rounded, folder, monkeypatch
):
    convert(folder, "llama-mha", 2, merge="mean")
    losses = []
    for has, wants in ((False, False), (hardware, asked)):
        monkeypatch.setattr(devices, "computes_bfloat16", lambda has=has: has)
        healing(folder, f"healed-{len(losses)}", steps=2, bf16=wants)
        history = (folder / f"healed-{len(losses)}" / "heal.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in history])
    assert (losses[0] != losses[1]) is rounded


def test_unequal_groups_are_healed(folder):
    model = tiny.model("llama-gqa")
    tiny.save(model, folder / "model")
    plan = ragged_plan(model)
    prune(folder / "model", folder / "out", CutRequest(plan=plan, layout=LayoutOption.RAGGED))
    healing(folder, steps=2)
    cut, healed = (
        {a.path: a.group_sizes for a in attention_of(headprune.from_pretrained(folder / name))}
        for name in ("out", "healed")
    )
    assert healed == cut and any(len(set(sizes)) > 1 for sizes in cut.values())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks
@pytest.mark.parametrize(
    ("train", "case"),
    slow_unless(
        lambda train, case: (
            (train, case) in ((HealTrain.LORA, "llama-mha"), (HealTrain.ALL, "bert-base"))
        ),
        product(HealTrain, ["llama-mha", "bert-base"]),
    ),
)
def test_healing_brings_a_model_nearer_to_its_teacher(train, case, folder):
    convert(folder, case, 2, merge="mean")
    result = healing(folder, train=train)
    assert result.after < 0.9 * result.before
    healed = headprune.from_pretrained(folder / "healed")
    assert {a.kv_heads for a in attention_of(healed)} == {2}
    assert verify(folder / "healed").passed
    assert len((folder / "healed" / "heal.jsonl").read_text().splitlines()) == 12
    assert not (folder / "healed-checkpoints").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_lora_adds_to_weights_in_their_own_type(stored, folder, monkeypatch):
    tiny.save(tiny.model("llama-mha", stored), folder / "model")
    convert(folder, "llama-mha", 2, merge="mean")
    monkeypatch.setattr(devices, "computes_bfloat16", lambda: True)
    types = {}

    def noted(net, *more):
        adapted = trainable(net, *more)
        for p in adapted.parameters():
            types.setdefault(p.requires_grad, set()).add(p.dtype)
        return adapted

    trainable = heal_module.trainable
    monkeypatch.setattr(heal_module, "trainable", noted)
    result = healing(folder, train=HealTrain.LORA)
    assert types == {False: {stored}, True: {torch.float32}}
    assert result.after < 0.9 * result.before
    assert headprune.from_pretrained(folder / "healed").dtype is stored
    assert verify(folder / "healed").passed


def test_lora_on_repeated_heads_is_refused(folder):
    convert(folder, "opt", 2, merge="mean")
    with pytest.raises(HeadpruneError, match="--train attention"):
        healing(folder, train=HealTrain.LORA)
    assert not (folder / "healed").exists()


@pytest.mark.parametrize("case", ["llama", "gpt2", "gpt_neox"])
def test_larger_queries_are_as_larger_weights(case):
    model = tiny.model(case).float()
    ids, attentions = torch.arange(3, 40)[None], attention_of(model)
    with torch.no_grad():
        with larger_queries(attentions, 1.3):
            hooked = model(ids).logits
        assert (model(ids).logits - hooked).abs().max() > 1e-3 * hooked.abs().max()
        for attention in attentions:
            heads = read_heads(attention)
            write_heads(attention, heads.with_affine("q", 1.3 * heads.affine("q")))
        assert (model(ids).logits - hooked).abs().max() < 1e-5 * hooked.abs().max()


@pytest.mark.parametrize(("case", "factor"), [("llama", 1.3), ("qwen3", 1.0)])
def test_scores_on_shared_keys_are_sharpened(case, factor, folder, monkeypatch):
    """A norm after W_Q would undo it."""
    weights = []
    # of the original, and of factors; the search ends after one that is no better
    for wanted, of_factors in ((1.0, [1.0, 1.005]), (1.3, [1.0, 2.0, 1.9, 1.5, 1.6])):
        losses = iter(of_factors)
        monkeypatch.setattr(conversion, "mean_loss", lambda *_, losses=losses: next(losses))
        out = folder / f"out-{wanted}"
        half = {"merge": "lowrank", "calibration_tokens": TEXT_TOKENS // 2, "output": out}
        done = convert(folder, case, 1, **half).pruned.manifest.done
        assert isinstance(done, Merging) and done.sharpness == (factor if wanted > 1 else 1.0)
        assert (next(losses, None) is None) == (case == "llama")
        assert verify(out).passed
        said = f"scores on shared keys x {factor:g}" in (out / "README.md").read_text()
        assert said == (done.sharpness > 1)
        modules = attention_of(headprune.from_pretrained(out))
        weights.append([read_heads(module) for module in modules])
    for before, after in zip(*weights, strict=True):
        assert torch.equal(before.k, after.k)
        assert torch.allclose(after.q, factor * before.q, rtol=1e-6, atol=0)
    short = convert(folder, case, 1, merge="lowrank", calibration_tokens=10**6).pruned.manifest.done
    assert isinstance(short, Merging) and short.sharpness == 1.0  # no text is left


def test_healing_is_refused_before_the_conversion(folder, monkeypatch):
    saved("llama", folder)
    monkeypatch.setattr("headprune.packages.find_spec", lambda name: None)
    wanted = {"kv_heads": 1, "calibrate": folder / "text.txt", "seq_len": 32, "train": "lora"}
    with pytest.raises(HeadpruneError, match="pip install peft"):
        headprune.convert_gqa(folder / "model", folder / "out", heal_steps=2, **wanted)
    assert not list(folder.glob("out*"))


def test_healing_keeps_the_dtype(folder):
    tiny.save(tiny.model("llama-mha", torch.float64), folder / "model")
    convert(folder, "llama-mha", 2, merge="mean")
    healing(folder)
    assert headprune.from_pretrained(folder / "healed").dtype is torch.float64
    assert "to match" in (folder / "healed" / "README.md").read_text()


def test_an_interrupted_healing_is_not_thrown_away(folder):
    convert(folder, "llama-mha", 2, merge="mean")
    with pytest.raises(SystemExit):
        healing(folder, step=lambda *_: sys.exit())
    with pytest.raises(CheckpointError, match="interrupted run"):
        healing(folder)


def test_attention_alone_moves_where_that_is_asked_for(folder):
    convert(folder, "llama-mha", 2, merge="mean")
    healing(folder, train=HealTrain.ATTENTION)
    before = headprune.from_pretrained(folder / "out").state_dict()
    after = headprune.from_pretrained(folder / "healed").state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all("self_attn" in name for name in moved)


def test_a_killed_healing_resumes_to_the_same_result(folder):
    convert(folder, "llama-mha", 2, merge="mean")
    healing(folder, "unbroken", save_every=3)

    class Killed(Exception):
        pass

    def kill(step, *_):
        if step == 8:
            raise Killed

    with pytest.raises(Killed):
        healing(folder, save_every=3, step=kill)
    assert not (folder / "healed").exists()
    with pytest.raises(CheckpointError, match="other settings"):
        healing(folder, save_every=3, seed=1, resume=True)
    healing(folder, save_every=3, resume=True)
    unbroken = headprune.from_pretrained(folder / "unbroken").state_dict()
    resumed = headprune.from_pretrained(folder / "healed").state_dict()
    assert all(torch.equal(unbroken[name], resumed[name]) for name in unbroken)


def test_a_teacher_of_another_kind_is_refused(folder):
    convert(folder, "llama-mha", 2, merge="mean")
    tiny.save(tiny.model("bert-mlm"), folder / "bert")
    text = DataConfig(source=str(folder / "text.txt"))
    config = HealConfig(steps=1, seq_len=16)
    with pytest.raises(HeadpruneError, match="Give the model it came from"):
        heal(folder / "out", folder / "bert", text, folder / "healed", config)


def test_a_teacher_with_its_classes_in_another_order_is_refused(folder):
    net = tiny.model("bert-classifier")
    for name, classes in (("model", ("neg", "pos")), ("turned", ("pos", "neg"))):
        net.config.id2label = dict(enumerate(classes))
        net.config.label2id = {label: number for number, label in enumerate(classes)}
        tiny.save(net, folder / name)
    text = DataConfig(source=str(folder / "text.txt"))
    config = HealConfig(steps=1, seq_len=16)
    with pytest.raises(HeadpruneError, match="number their classes differently"):
        heal(folder / "model", folder / "turned", text, folder / "healed", config)


@pytest.mark.parametrize(
    ("case", "setting", "told"),
    [
        ("bert-classifier", {"num_labels": 5}, "with 5 labels"),
        ("bert-base", {"hidden_size": 24}, "hidden states of 24 channels"),
    ],
)
def test_a_teacher_of_another_size_is_refused(case, setting, told, folder):
    net = tiny.model(case)
    tiny.save(net, folder / "model")
    tiny.save(type(net)(type(net.config)(**{**net.config.to_dict(), **setting})), folder / "other")
    text = DataConfig(source=str(folder / "text.txt"))
    config = HealConfig(steps=1, seq_len=16)
    with pytest.raises(HeadpruneError, match=f"{told}. Give the model it came from"):
        heal(folder / "model", folder / "other", text, folder / "healed", config)
    heal(folder / "model", folder / "model", text, folder / "healed", config)


def test_what_fails_before_the_first_checkpoint_leaves_nothing_to_resume(folder, monkeypatch):
    def breaking(*arguments):
        raise RuntimeError("no memory")

    convert(folder, "llama-mha", 2, merge="mean")
    with monkeypatch.context() as patched:
        patched.setattr("headprune.distillation.trainer.blended", breaking)
        with pytest.raises(RuntimeError, match="no memory"):
            healing(folder)
    assert not (folder / "healed-checkpoints").exists()
    healing(folder)


@pytest.mark.parametrize("case", ["llama-mha", "gpt2"])
def test_a_layer_whose_attention_is_zero_is_merged(case, folder):
    model = tiny.model(case)
    with torch.no_grad():
        for weight in attention_of(model)[0].module.parameters():
            weight.zero_()
    tiny.save(model, folder / "model")
    done = convert(folder, case, 2, merge="lowrank")
    assert done.pruned.manifest.kv_heads[1] == 2 * len(attention_of(model))
    converted = headprune.from_pretrained(folder / "out")
    assert all(bool(weight.isfinite().all()) for weight in converted.parameters())
    assert verify(folder / "out").passed
