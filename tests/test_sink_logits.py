"""Sink logits: Granite SWA of the same weights, measured, trained, and run by llama.cpp."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import headprune
from headprune.context import Context
from headprune.distillation import heal as module
from headprune.errors import HeadpruneError
from headprune.model.attention import attention_of
from headprune.surgery.cut import resolve
from headprune.surgery.edit import Edit, trying
from headprune.surgery.layer_windows import WITH_LOGITS, with_windows
from headprune.surgery.sink_logits import (
    IN_ONE_KERNEL,
    NO_SINK,
    no_sink_logits,
    sink_logits,
    with_sink_logits,
)
from tests import tiny
from tests.cutting import prove
from tests.test_layer_windows import OWN
from tests.test_resume import Killed, kill_at
from tests.test_windows import apart, plan_of

NEAR, SIZE, FULL = (1, 3), 16, ["full_attention"]
PATH = "model.layers.{}.self_attn"


def windowed(case):
    """A model whose second and fourth layer see 16 tokens, of the class that holds it."""
    model = tiny.model(case, max_position_embeddings=512, **OWN.get(case.partition("-")[0], {}))
    config = with_windows(model.config, NEAR, SIZE)
    plain = AutoModelForCausalLM.from_config(config).eval()
    plain.load_state_dict(model.state_dict())
    return plain


def ids(rows=2, length=60):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(5, tiny.VOCAB, (rows, length), generator=generator)


@pytest.mark.parametrize("case", ["llama-gqa", "mistral", "qwen2"])
def test_logits_of_no_weight_change_nothing(case):
    plain = windowed(case)
    expected = plain(ids()).logits
    heads = plain.config.num_attention_heads
    assert no_sink_logits(plain.config) is None and plain.config.model_type in WITH_LOGITS
    same = with_sink_logits(plain, {})
    assert same.config.model_type == "granite_swa" and same.lm_head.weight.is_contiguous()
    torch.testing.assert_close(same(ids()).logits, expected, atol=2e-5, rtol=0)
    generated = same.generate(ids(1), max_new_tokens=30, do_sample=False)
    other = plain.generate(ids(1), max_new_tokens=30, do_sample=False)
    assert generated.tolist() == other.tolist()
    weighty = with_sink_logits(
        windowed(case), {PATH.format(1): torch.zeros(heads)}
    )  # the corrupted sibling
    assert (weighty(ids()).logits - expected).abs().max() > 0.01
    assert [a.module.sinks[0].item() for a in attention_of(weighty)] == [NO_SINK, 0.0] + [
        NO_SINK
    ] * 2


@pytest.mark.parametrize("case", ["mistral", "qwen2"])
@pytest.mark.parametrize(
    "stored",
    [
        {"attention_bias": False},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"pretraining_tp": 2},
        {"head_dim": None},
        {"attention_multiplier": 0.5},
        {"embedding_multiplier": 12.0},
        {"logits_scaling": 8.0},
        {"layer_rope_theta": [0, 0, 0, 0]},
        {"rope_theta": 5e5},
        {"max_window_layers": 4},
        {"tie_word_embeddings": True},
    ],
    ids=str,
)
def test_settings_that_the_class_ignores_stay_ignored(case, stored, tmp_path):
    """A config.json may hold settings of other classes, which Granite SWA would obey."""
    windowed(case).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | stored))
    try:
        plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    except TypeError:  # ministral computes no head_dim
        assert stored == {"head_dim": None}
        return
    expected = plain(ids()).logits
    same = with_sink_logits(plain, {})(ids()).logits
    torch.testing.assert_close(same, expected, atol=2e-5, rtol=0)


def test_a_logit_stands_beside_the_scores():
    """The denominator of the softmax has one exponential more."""
    model, logit = windowed("llama-gqa"), 0.7
    inputs = {}
    first = (
        with_sink_logits(model, {PATH.format(1): torch.full((6,), logit)}).model.layers[1].self_attn
    )
    first.o_proj.register_forward_pre_hook(lambda module, args: inputs.update(with_logit=args[0]))
    hidden, length = torch.randn(1, 10, 48), 10
    where = torch.arange(length)[None]
    turned = model.model.rotary_emb(hidden, where)
    mask = torch.full((length, length), float("-inf")).triu(1)
    first(hidden, turned, mask[None, None])
    q, k, v = (
        getattr(first, f"{role}_proj")(hidden).view(1, length, -1, first.head_dim).transpose(1, 2)
        for role in "qkv"
    )
    q, k = apply_rotary_pos_emb(q, k, *turned)
    k, v = (each.repeat_interleave(2, 1) for each in (k, v))
    scores = (q @ k.mT / first.head_dim**0.5 + mask).exp()
    wanted = scores / (scores.sum(-1, keepdim=True) + torch.tensor(logit).exp()) @ v
    torch.testing.assert_close(inputs["with_logit"], wanted.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_kernel_computes_the_same(dtype):
    """With padding on the left, as own attention computes it; gradients of logits, too."""
    rows, seen = ids(), torch.ones(2, 60, dtype=torch.int64)
    seen[0, :7] = 0
    logits = {PATH.format(n): torch.linspace(-2, 2, 6) for n in NEAR}
    own = with_sink_logits(windowed("llama-gqa").to(dtype), logits)
    results = []
    for how in ("eager", IN_ONE_KERNEL):
        own.set_attn_implementation(how)
        outputs = own(rows, attention_mask=seen, labels=rows)
        outputs.loss.backward()
        sinks = own.model.layers[1].self_attn.sinks
        results.append((outputs.logits[1], outputs.logits[0, 7:], sinks.grad.clone()))
        own.zero_grad()
    most = 1e-5 if dtype is torch.float32 else 0.05
    assert all(apart(a, b) < most for a, b in zip(*results, strict=True))
    own.set_attn_implementation(IN_ONE_KERNEL)
    with torch.no_grad():
        own.model.layers[1].self_attn.sinks += 1  # the corrupted sibling
    assert apart(own(rows, attention_mask=seen).logits[1], results[0][0]) > most
    with torch.no_grad():
        own.model.layers[1].self_attn.sinks -= 1
    generated = own.generate(rows, attention_mask=seen, max_new_tokens=9, do_sample=False)
    own.set_attn_implementation("eager")
    same = own.generate(rows, attention_mask=seen, max_new_tokens=9, do_sample=False)
    assert dtype is torch.bfloat16 or generated.tolist() == same.tolist()


def test_logits_begin_with_the_weight_of_the_first_tokens():
    model = windowed("llama-gqa")
    text, path = ids(3, 40), PATH.format(1)
    measured = sink_logits(model, [path], [{"input_ids": row[None]} for row in text])
    layer = model.model.layers[1]
    hidden = layer.input_layernorm(model(text, output_hidden_states=True).hidden_states[1])
    q, k = (
        getattr(layer.self_attn, f"{role}_proj")(hidden).view(3, 40, -1, 10).transpose(1, 2)
        for role in "qk"
    )
    q, k = apply_rotary_pos_emb(q, k, *model.model.rotary_emb(hidden, torch.arange(40)[None]))
    scores = q @ k[:, :, :4].repeat_interleave(2, 1).mT * 10**-0.5
    weight = scores.exp().sum(-1).log()
    torch.testing.assert_close(measured[path], weight[:, :, SIZE + 4 :].mean((0, 2)) - 2)
    assert (measured[path] - weight.mean((0, 2)) + 2).abs().max() > 1e-3  # of all queries


def test_further_layers_get_a_window_beside_logits(tmp_path):
    heads = torch.linspace(-1, 1, 6)
    model, wanted = (
        with_sink_logits(
            windowed("llama-gqa"), {PATH.format(1): heads.clone(), PATH.format(3): heads + 1}
        )
        for _ in "ab"
    )
    plan = plan_of(model, forms=((0, 1, 2), (), (), ()), size=SIZE, sinks=0)
    proof = prove(model, resolve(plan, model), tmp_path / "out")
    assert proof.windows["window shorter by one"] > 0.01
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert stock.config.layer_types == ["sliding_attention"] * 2 + FULL + ["sliding_attention"]
    with trying(wanted, Edit(plan)):
        expected = wanted(ids(), use_cache=False).logits
    assert apart(stock(ids()).logits, expected) < 1e-5 < apart(wanted(ids()).logits, expected)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logits")
    model = tiny.model("llama-gqa", attention_bias=False, max_position_embeddings=512)
    tiny.save(model, folder / "m")
    text = folder / "long.txt"
    text.write_text("\n".join(tiny.text(60, seed=seed) for seed in range(300)))
    how = {"window": SIZE, "context_tokens": 128, "data": text, "targets": ["llama.cpp"]}
    headprune.convert_swa(folder / "m", folder / "windowed", **how)
    return folder


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks
@pytest.mark.parametrize("train", ["all", "attention", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_healing_trains_logits(folder, train, dtype, tmp_path, monkeypatch):
    began = {}

    def noting(*given):
        fitted = sink_logits(*given)
        began.update({path: logits.clone() for path, logits in fitted.items()})
        return fitted

    monkeypatch.setattr(module, "sink_logits", noting)
    how = {"teacher": folder / "m", "data": folder / "long.txt", "steps": 4, "out_dtype": dtype}
    healed = headprune.heal(folder / "windowed", tmp_path / "healed", train=train, **how)
    assert healed.sink_logits == 12 and healed.taken_after
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "healed")
    assert stock.config.model_type == "granite_swa" and stock.dtype == getattr(torch, dtype)
    near = [n for n, kind in enumerate(stock.config.layer_types) if kind == "sliding_attention"]
    assert sorted(map(PATH.format, near)) == sorted(began)
    own = AutoModelForCausalLM.from_pretrained(folder / "m", dtype=stock.dtype)
    for before, after in zip(attention_of(own), attention_of(stock), strict=True):
        logits = after.module.sinks.detach().float()
        if after.path in began:  # by units, where weights move by thousandths
            moved = (logits - began[after.path]).abs()
            assert 0.01 < moved.max() < 2
        else:
            assert (logits < -9e3).all()
        gap = before.module.o_proj.weight - after.module.o_proj.weight
        assert 0 < gap.abs().max() < 0.01
    assert headprune.verify(tmp_path / "healed").passed
    assert headprune.inspect(tmp_path / "healed").window.size == SIZE
    card = (tmp_path / "healed" / "README.md").read_text()
    assert "with sink logits for 12 query heads" in card and "llama-server" in card


def test_a_killed_training_of_logits_is_resumed_to_the_same_end(folder, tmp_path):
    how = {"teacher": folder / "m", "data": folder / "long.txt", "steps": 6, "save_every": 2}
    headprune.heal(folder / "windowed", tmp_path / "whole", **how)
    context = Context(step=kill_at(5))
    with pytest.raises(Killed):
        headprune.heal(folder / "windowed", tmp_path / "out", context=context, **how)
    headprune.heal(folder / "windowed", tmp_path / "out", resume=True, **how)
    whole, resumed = (tmp_path / name / "model.safetensors" for name in ("whole", "out"))
    assert whole.read_bytes() == resumed.read_bytes()


def test_logits_can_be_left_out(folder, tmp_path):
    how = {"teacher": folder / "m", "data": folder / "long.txt", "steps": 2, "sink_logits": False}
    healed = headprune.heal(folder / "windowed", tmp_path / "healed", **how)
    assert not healed.sink_logits
    config = json.loads((tmp_path / "healed" / "config.json").read_text())
    assert config["model_type"] == "ministral"
    with pytest.raises(HeadpruneError, match="sink_logits=false has no effect: no layer has"):
        headprune.heal(folder / "m", tmp_path / "other", **how)


def test_logits_that_make_it_worse_are_left_out(folder, tmp_path, monkeypatch):
    """The result is held against the model without logits."""
    heavy = {path: torch.full((6,), 9.0) for path in map(PATH.format, range(4))}
    monkeypatch.setattr(
        module, "sink_logits", lambda net, paths, rows: {p: heavy[p] for p in paths}
    )
    how = {"teacher": folder / "m", "data": folder / "long.txt", "steps": 2}
    healed = headprune.heal(folder / "windowed", tmp_path / "healed", **how)
    assert not healed.taken_after and not healed.sink_logits and healed.before == healed.after
    config = json.loads((tmp_path / "healed" / "config.json").read_text())
    assert config["model_type"] == "ministral"


def test_a_model_with_logits_is_healed_again_from_another_size(folder, tmp_path):
    """Heads of a pruned model keep their ids, and need none of the teacher's heads."""
    how = {"scores": None, "plan": tmp_path / "plan.json", "layout": "uniform"}
    (tmp_path / "plan.json").write_text(json.dumps({PATH.format(n): [0, 1] for n in range(4)}))
    headprune.prune(folder / "m", tmp_path / "pruned", **how)
    text = {"data": folder / "long.txt"}
    of = {"window": SIZE, "context_tokens": 128, "targets": ["vllm"]} | text
    headprune.convert_swa(tmp_path / "pruned", tmp_path / "near", **of)
    how = {"teacher": folder / "m", "steps": 2} | text
    first = headprune.heal(tmp_path / "near", tmp_path / "first", **how)
    assert first.sink_logits == 8 and first.pruned.manifest.layout[PATH.format(0)].kv_heads == (
        1,
        2,
    )
    before = load_file(tmp_path / "first" / "model.safetensors")
    second = headprune.heal(tmp_path / "first", tmp_path / "second", **how)
    assert second.sink_logits == 8
    after = load_file(tmp_path / "second" / "model.safetensors")
    moved = [(after[name] - before[name]).abs().max() for name in before if "sinks" in name]
    assert sorted(gap > 0.01 for gap in moved) == [False, False, True, True]


def test_windows_for_an_engine_are_healed_with_logits(folder, tmp_path):
    how = {"window": SIZE, "context_tokens": 128, "data": folder / "long.txt", "heal_steps": 2}
    done = headprune.convert_swa(folder / "m", tmp_path / "out", targets=["vllm"], **how)
    assert done.sink_logits == 12
    assert done.pruned.manifest.engines == ("llama.cpp", "vLLM")


@pytest.mark.process
@pytest.mark.parametrize(
    ("case", "dtype"), [("llama-mha", "auto"), ("llama-mha", "q8_0"), ("qwen2", "auto")]
)
def test_llama_cpp_computes_logits(case, dtype, tmp_path, monkeypatch):
    pytest.importorskip("xllamacpp")
    from headprune.formats import gguf_file
    from tests import gguf_words

    model = tiny.model(case, **OWN.get(case.partition("-")[0], {}))
    model.resize_token_embeddings(gguf_words.SIZE)
    gguf_words.words("GPT-2").save_pretrained(tmp_path / "m")
    plain = AutoModelForCausalLM.from_config(with_windows(model.config, NEAR, 8)).eval()
    plain.load_state_dict(model.state_dict())
    heads = plain.config.num_attention_heads
    logits = {PATH.format(1): torch.linspace(-2, 2, heads), PATH.format(3): torch.ones(heads)}
    with_sink_logits(plain, logits).save_pretrained(tmp_path / "m")
    done = headprune.export(tmp_path / "m", tmp_path / "out", to="gguf", out_dtype=dtype)
    proof = done.record.proof
    assert proof.how == "engine" and not done.record.changes
    assert proof.difference < (1e-3 if dtype == "auto" else 0.05)
    if dtype == "auto":  # biases of Qwen2 among the tensors
        assert proof.details["greedy tokens equal"] == 64
        pieces = gguf_file._pieces

        def zeros(source, parts):
            for heads, piece in pieces(source, parts):
                yield heads, piece * 0 if parts[0][0].endswith("sinks") else piece

        monkeypatch.setattr(gguf_file, "_pieces", zeros)  # the corrupted sibling
        with pytest.raises(HeadpruneError, match="compute something else"):
            headprune.export(tmp_path / "m", tmp_path / "wrong", to="gguf")
