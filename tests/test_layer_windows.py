"""Windows of whole layers without sinks: a plain config that stock classes obey."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache

import headprune
from headprune.context import Allowed
from headprune.errors import HeadpruneError, PlanError
from headprune.model.attention import attention_of
from headprune.model.cost import KVCache
from headprune.schemas.plan import Shape
from headprune.surgery.cut import resolve, result_shape
from headprune.surgery.edit import Edit, trying
from headprune.surgery.layer_windows import HELD_BY, no_layer_windows
from tests import tiny
from tests.cutting import prove
from tests.test_windows import SIZE, apart, plan_of

# as a model of each type has them: Llama and Mistral with settings that Ministral has as well
OWN = {
    "llama": {"attention_bias": False},
    "mistral": {"sliding_window": None},
    "ministral": {"layer_types": ["full_attention"] * 4},
}
MODELS = [kind for kind in HELD_BY if kind in tiny.FAMILY_CASES]


def layers_of(model, size=SIZE, sinks=0):
    """Every second layer sees a window only, those that had one left alone."""
    forms = [tuple(range(a.kv_heads)) if n % 2 else () for n, a in enumerate(attention_of(model))]
    return plan_of(model, forms=tuple(forms), size=size, sinks=sinks)


@pytest.mark.parametrize("kind", MODELS)
def test_a_plain_config_computes_as_a_mask_does(kind, tmp_path):
    model = tiny.model(kind, **OWN.get(kind, {}))
    plan = layers_of(model)
    cuts = resolve(plan, model)
    assert result_shape(cuts, model.config) is Shape.NATIVE
    proof = prove(model, cuts, tmp_path / "out")
    assert proof.windows["window shorter by one"] > 0.01
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == HELD_BY[kind] and "auto_map" not in config
    assert config["layer_types"].count("sliding_attention") >= 2
    assert config.get("max_window_layers", 0) == 0  # with all layers vLLM ignores windows
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.randint(5, tiny.VOCAB, (2, 40), generator=torch.Generator().manual_seed(0))
    wanted = tiny.model(kind, **OWN.get(kind, {}))
    with trying(wanted, Edit(plan)):
        expected = wanted(ids, use_cache=False).logits
    assert apart(stock(ids).logits, expected) < 1e-5
    with trying(wanted, Edit(layers_of(wanted, size=SIZE - 1))):  # the corrupted sibling
        assert apart(stock(ids).logits, wanted(ids, use_cache=False).logits) > 0.01


def test_every_type_of_the_table_is_tried():
    assert {*MODELS, "granite_swa"} == {*HELD_BY}  # tests/test_sink_logits.py has that


def test_a_cache_keeps_what_the_window_needs(tmp_path):
    model = tiny.model("llama-gqa", attention_bias=False)
    prove(model, resolve(layers_of(model), model), tmp_path / "out")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    cache = DynamicCache(config=stock.config)
    stock(torch.randint(5, tiny.VOCAB, (1, 60)), past_key_values=cache)
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert held == KVCache.of(stock).elements(60)


@pytest.mark.parametrize(
    ("case", "settings", "said"),
    [
        ("llama-gqa", {}, "ministral, which would hold them, has no attention_bias"),
        ("gemma3_text", {}, "no class of transformers is a gemma3_text"),
        ("phi3", {}, "no class of transformers is a phi3"),
        ("gemma2", {"layer_types": ["sliding_attention", "full_attention"] * 2}, "--window 8"),
    ],
)
def test_what_no_class_holds_is_refused_by_name(case, settings, said):
    model = tiny.model(case, **settings)
    assert said in no_layer_windows(model.config, 16)
    if case != "phi3":  # each of its layers has a window
        cuts = resolve(layers_of(model, size=16), model)
        assert result_shape(cuts, model.config) is Shape.RUNTIME


def test_sinks_and_windows_of_some_heads_need_the_runtime():
    model = tiny.model("qwen2")
    for plan in (layers_of(model, sinks=2), plan_of(model, forms=((0,),), sinks=0)):
        assert result_shape(resolve(plan, model), model.config) is Shape.RUNTIME


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama beside text, and the result of convert-swa --for vllm."""
    above = tmp_path_factory.mktemp("plain")
    tiny.save(
        tiny.model("llama-gqa", attention_bias=False, max_position_embeddings=512), above / "m"
    )
    text = "\n".join(tiny.text(60, seed=seed) for seed in range(40))
    (above / "text.txt").write_text(text)
    how = {"window": 16, "context_tokens": 128, "data": above / "text.txt"}
    headprune.convert_swa(above / "m", above / "out", targets="vllm", **how)
    return above


def test_convert_swa_for_an_engine(folder):
    out, manifest = folder / "out", json.loads((folder / "out" / "headprune.json").read_text())
    assert manifest["shape"] == "native" and manifest["engines"] == ["llama.cpp", "vLLM"]
    assert manifest["window"] == {"size": 16, "sinks": 0}
    assert "vllm serve out --model-impl transformers" in (out / "README.md").read_text()
    assert headprune.verify(out, against=folder / "m").passed
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "sliding_window": 15}))
    checks = headprune.verify(out, against=folder / "m").checks
    assert [check.passed for check in checks] == [False] * len(checks)
    (out / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"targets": "vllm", "level": "head"}, "leave out --level, --sinks"),
        ({"targets": "anywhere", "sinks": 4}, "leave out --level, --sinks"),
        ({"targets": "onnx"}, "--for onnx: it holds no windows of layers"),
        ({"targets": "anywhere", "window": 1}, "no window of 1 token"),
    ],
)
def test_what_an_engine_does_not_hold(folder, given, said):
    with pytest.raises(HeadpruneError, match=said):
        headprune.convert_swa(folder / "m", folder / "no", data=folder / "text.txt", **given)
    assert not (folder / "no").exists()


def test_windows_of_a_half_precision_model(folder, tmp_path):
    model = tiny.model("qwen3", dtype=torch.bfloat16, max_position_embeddings=512)
    tiny.save(model, tmp_path / "m")
    plan = layers_of(model)
    plan.model_copy(update={"model": None}).write(tmp_path / "plan.json")
    headprune.prune(tmp_path / "m", tmp_path / "out", plan=tmp_path / "plan.json")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert stock.dtype is torch.bfloat16 and stock.config.sliding_window == SIZE
    with pytest.raises(PlanError, match="a window already"):
        resolve(plan, stock)


def packed(folder, method, tmp_path):
    """A checkpoint of another one, its projections stored as a method of quantisation does."""
    shutil.copytree(folder, tmp_path / method)
    tensors = dict[str, torch.Tensor]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if "proj" not in name:
            tensors[name] = tensor.half()
        elif method == "fp8":
            tensors |= {name: tensor.to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
        elif method == "gptq":
            tensors |= {f"{stem}.qweight": torch.randint(0, 2**30, (2, 3), dtype=torch.int32)}
            tensors |= {f"{stem}.scales": torch.rand(2, 3).half()}
        else:  # a packed weight under its own name, and what unpacks it
            tensors |= {name: torch.randint(0, 255, (7, 1), dtype=torch.uint8)}
            tensors |= {f"{name}.absmax": torch.rand(4), f"{name}.quant_map": torch.rand(16)}
    save_file(tensors, tmp_path / method / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "float16"}
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    (tmp_path / method / "config.json").write_text(json.dumps(config))
    return tmp_path / method


@pytest.mark.parametrize("method", ["fp8", "gptq", "bitsandbytes"])
def test_a_quantised_checkpoint_keeps_its_bytes(folder, method, tmp_path):
    source, out = packed(folder / "m", method, tmp_path), tmp_path / "out"
    near = {"window": 16, "sinks": 0, "context_tokens": 128, "data": folder / "text.txt"}
    headprune.score(folder / "m", tmp_path / "scores", form="window", unit="layer", **near)
    with pytest.raises(HeadpruneError, match="is quantised, and cannot be measured"):
        headprune.convert_swa(source, out, targets="vllm", data=folder / "text.txt")
    result = headprune.convert_swa(source, out, scores=tmp_path / "scores", targets="vllm")
    assert "No outputs were compared, as the weights are quantised" in result.warnings[0]
    weights = [(each / "model.safetensors").read_bytes() for each in (source, out)]
    assert weights[0] == weights[1]
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == method
    assert config["layer_types"].count("sliding_attention") == 2
    assert headprune.verify(out, against=source).passed
    (out / "model.safetensors").write_bytes(weights[0][:-1] + bytes([weights[0][-1] ^ 1]))
    failed = [c.name for c in headprune.verify(out, against=source).checks if not c.passed]
    assert failed == ["hashes", f"what stays of {source}"]


def test_packed_weights_are_touched_by_nothing_else(folder, tmp_path):
    source = packed(folder / "m", "fp8", tmp_path)
    how = {"window": 16, "context_tokens": 128, "data": folder / "text.txt"}
    headprune.score(folder / "m", tmp_path / "scores", form="window", **how)
    with pytest.raises(HeadpruneError, match="only windows of whole layers"):
        headprune.convert_swa(source, tmp_path / "out", scores=tmp_path / "scores")
    other = tiny.model("llama-mha", attention_bias=False, max_position_embeddings=512)
    tiny.save(other, tmp_path / "other")
    headprune.score(tmp_path / "other", tmp_path / "others", form="window", unit="layer", **how)
    both = {"scores": tmp_path / "scores", "out_dtype": "float32"}
    with pytest.raises(HeadpruneError, match="its element types stay"):
        headprune.convert_swa(source, tmp_path / "out", **both)
    heal = {"heal_steps": 2, "data": folder / "text.txt", "scores": tmp_path / "scores"}
    with pytest.raises(HeadpruneError, match="is quantised"):
        headprune.convert_swa(source, tmp_path / "out", **heal)
    with pytest.raises(PlanError, match="other numbers of heads"):
        headprune.convert_swa(source, tmp_path / "out", scores=tmp_path / "others")
    assert not (tmp_path / "out").exists()


def test_shards_are_carried_over_with_their_index(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder / "m")
    model.save_pretrained(tmp_path / "m", max_shard_size="100KB")
    plan = layers_of(model)
    plan.model_copy(update={"model": None}).write(tmp_path / "plan.json")
    headprune.prune(tmp_path / "m", tmp_path / "out", plan=tmp_path / "plan.json")
    names = {file.name for file in (tmp_path / "m").glob("model*")}
    assert len(names) > 2 and {file.name for file in (tmp_path / "out").glob("model*")} == names
    for name in names:
        assert (tmp_path / "m" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    # a shard that the class has no use for is not named by the index of the result
    index = tmp_path / "m" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    save_file({"unused": torch.zeros(3)}, tmp_path / "m" / "model-extra.safetensors")
    content["weight_map"]["unused"] = "model-extra.safetensors"
    index.write_text(json.dumps(content))
    context = headprune.Context(allowed=Allowed(drop_unexpected=True))
    how = {"plan": tmp_path / "plan.json", "context": context, "overwrite": True}
    headprune.prune(tmp_path / "m", tmp_path / "out", **how)
    assert headprune.verify(tmp_path / "out").passed


def test_inspect_names_the_layers_with_a_window(folder):
    seen = headprune.inspect(folder / "out")
    assert (seen.window.size, seen.window.sinks) == (16, 0)
    assert [a.window_heads for a in seen.attentions].count(3) == 2
    assert headprune.inspect(folder / "m").window is None


def test_windows_of_heads_are_counted_apart_from_those_of_layers(folder, tmp_path):
    how = {"window": 8, "keep_full": 1, "seq_len": 64, "data": folder / "text.txt"}
    result = headprune.convert_swa(folder / "out", tmp_path / "both", **how)
    seen = headprune.inspect(tmp_path / "both")
    assert (seen.window.size, seen.window.sinks) == (8, 4)
    assert sum(a.window_heads for a in seen.attentions) == result.manifest.done.heads == 5
    assert "only heads with a whole past can recall it" in (tmp_path / "both/README.md").read_text()


def test_a_healed_result_keeps_the_record_of_its_windows(folder, tmp_path):
    text = tmp_path / "long.txt"
    text.write_text("\n".join(tiny.text(60, seed=seed) for seed in range(300)))
    how = {"teacher": folder / "m", "data": text, "steps": 2}
    healed = headprune.heal(folder / "out", tmp_path / "healed", **how)
    made = json.loads((folder / "out" / "headprune.json").read_text())
    for manifest in (made, json.loads((tmp_path / "healed" / "headprune.json").read_text())):
        assert manifest["window"] == {"size": 16, "sinks": 0}
        near = [heads.get("window_heads") for heads in manifest["layout"].values()]
        assert sorted(near, key=str) == [3, 3, None, None]
    card = (tmp_path / "healed" / "README.md").read_text()
    assert "vllm serve healed --model-impl transformers" in card
    assert "6 of 12 KV heads see only the latest 16 tokens" in card
    assert headprune.verify(tmp_path / "healed").passed and healed.taken_after


def test_gate_values_beside_windows_of_layers_need_the_runtime():
    model = tiny.model("qwen2")
    plan = layers_of(model)
    path, part = next(iter(plan.attentions.items()))
    scaled = part.model_copy(update={"scale": (0.3,) * len(part.keep)})
    plan = plan.model_copy(update={"attentions": {**plan.attentions, path: scaled}})
    assert result_shape(resolve(plan, model), model.config) is Shape.RUNTIME


def test_a_model_in_use_stays_as_it_is():
    """Hooks, adapters and training mode outlive the change of class."""
    model = tiny.model("mistral", sliding_window=None).train()
    model.activation_checkpointing_enable()
    layer, seen = model.model.layers[0], []
    layer.register_forward_hook(lambda *_: seen.append(1))
    wrapped = type("Wrapped", (nn.Linear,), {})  # as adapters replace it
    layer.self_attn.q_proj.__class__ = wrapped
    headprune.apply(model, layers_of(tiny.model("mistral", sliding_window=None)))
    model(torch.arange(5, 25)[None]).logits.sum().backward()
    assert model.model.layers[0] is layer and type(layer.self_attn.q_proj) is wrapped
    assert seen and model.training and model.is_activation_checkpointing


# quantization_config as published checkpoints spell it, and tensors as they name them
METHODS = {
    "fp8, blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        {"weight": "f8", "weight_scale_inv": "f32"},
    ),
    "fp8, ModelOpt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        {"weight": "f8", "weight_scale": "f32", "input_scale": "f32"},
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        {"weight": "f8", "weight_scale": "f32"},
    ),
    "compressed-tensors, fp8": (
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}},
        {"weight": "f8", "weight_scale": "bf16"},
    ),
    "compressed-tensors, int4": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
        {"weight_packed": "i32", "weight_scale": "bf16", "weight_shape": "i64"},
    ),
    "compressed-tensors, mxfp8": (
        {"quant_method": "compressed-tensors", "format": "mxfp8", "config_groups": {}},
        {"weight": "f8", "weight_scale": "e8m0"},
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True},
        {"qweight": "i32", "qzeros": "i32", "scales": "f16", "g_idx": "i32"},
    ),
    "awq": (
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "version": "gemm",
            "zero_point": True,
        },
        {"qweight": "i32", "qzeros": "i32", "scales": "f16"},
    ),
    "bitsandbytes, 4 bits": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"weight": "u8", "weight.absmax": "u8", "weight.quant_state.bitsandbytes__nf4": "u8"},
    ),
    "bitsandbytes, 8 bits": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0},
        {"weight": "i8", "SCB": "f32", "weight_format": "u8"},
    ),
}
STORED = {
    **{"f8": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu, "bf16": torch.bfloat16},
    **{"f32": torch.float32, "f16": torch.float16, "i64": torch.int64, "i32": torch.int32},
    **{"u8": torch.uint8, "i8": torch.int8},
}


@pytest.mark.parametrize("method", METHODS)
def test_ten_spellings_of_quantised_checkpoints(folder, method, tmp_path):
    settings, parts = METHODS[method]
    shutil.copytree(folder / "m", tmp_path / "m")
    tensors = dict[str, torch.Tensor]()
    for name, tensor in load_file(folder / "m" / "model.safetensors").items():
        if "proj" not in name:
            tensors[name] = tensor.bfloat16()
            continue
        stem = name.removesuffix(".weight")
        for part, kind in parts.items():
            shape = tensor.shape if part == "weight" and kind in ("f8", "i8") else (4, 1)
            tensors[f"{stem}.{part}"] = torch.ones(shape).to(STORED[kind])
    save_file(tensors, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "m" / "config.json").read_text())
    config |= {"torch_dtype": "bfloat16", "quantization_config": settings}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    model = headprune.from_pretrained(folder / "m")
    layers_of(model).model_copy(update={"model": None}).write(tmp_path / "plan.json")
    source, out = tmp_path / "m", tmp_path / "out"
    near = {"window": 16, "sinks": 0, "context_tokens": 128, "data": folder / "text.txt"}
    headprune.score(folder / "m", tmp_path / "scores", form="window", unit="layer", **near)
    headprune.convert_swa(source, out, scores=tmp_path / "scores")
    weights = [(each / "model.safetensors").read_bytes() for each in (source, out)]
    assert weights[0] == weights[1]
    written = json.loads((out / "config.json").read_text())
    assert written["quantization_config"] == settings
    assert written["model_type"] == "ministral" and written["sliding_window"] == 16
    assert headprune.verify(out, against=source).passed


# attention settings as published config.json files spell them
PUBLISHED = {
    "Llama 2": {"model_type": "llama", "pretraining_tp": 1, "rope_scaling": None},
    "Llama 3.1": {
        "model_type": "llama",
        "rope_theta": 500000.0,
        "eos_token_id": [3, 4],
        "rope_scaling": {
            **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            **{"original_max_position_embeddings": 64, "rope_type": "llama3"},
        },
    },
    "linear rope": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "SmolLM2": {"model_type": "llama", "rope_theta": 100000, "tie_word_embeddings": True},
    "Mistral 0.3": {"model_type": "mistral", "sliding_window": None, "rope_theta": 1000000.0},
    "Qwen2.5": {
        "model_type": "qwen2",
        **{"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 2},
    },
    "Qwen2.5, windows null": {"model_type": "qwen2", "sliding_window": None},
    "Qwen3": {
        "model_type": "qwen3",
        **{"head_dim": 12, "use_sliding_window": False, "max_window_layers": 4},
        **{"sliding_window": None, "attention_bias": False},
    },
    "SmolLM3": {
        "model_type": "smollm3",
        **{"no_rope_layers": [1, 1, 1, 0], "no_rope_layer_interval": 4},
        "use_sliding_window": False,
    },
    "Gemma 2": {
        "model_type": "gemma2",
        **{"sliding_window": 8, "query_pre_attn_scalar": 12, "head_dim": 12},
        **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    },
}


@pytest.mark.parametrize("published", PUBLISHED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ten_configs_as_published(published, dtype, tmp_path):
    settings = {
        **{"vocab_size": tiny.VOCAB, "hidden_size": 48, "intermediate_size": 32},
        **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"max_position_embeddings": 128, "hidden_act": "silu", "torch_dtype": dtype},
        **{"initializer_range": 0.2, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1},
        **PUBLISHED[published],
    }
    torch.manual_seed(0)
    kind = CONFIG_MAPPING[settings["model_type"]]
    model = AutoModelForCausalLM.from_config(kind.from_dict(settings)).eval()
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path / "m")
    settings["architectures"] = [type(model).__name__]
    (tmp_path / "m" / "config.json").write_text(json.dumps(settings))
    plan = layers_of(model)
    plan.model_copy(update={"model": None}).write(tmp_path / "plan.json")
    headprune.prune(tmp_path / "m", tmp_path / "out", plan=tmp_path / "plan.json")
    weights = [(tmp_path / each / "model.safetensors").read_bytes() for each in ("m", "out")]
    assert weights[0] == weights[1]
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32")
    ids = torch.randint(5, tiny.VOCAB, (1, 60), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="float32")
    with trying(model, Edit(plan)):
        wanted = model(ids, use_cache=False).logits
    assert apart(stock(ids).logits, wanted) < 1e-5 < 1e-3 < apart(model(ids).logits, wanted)
