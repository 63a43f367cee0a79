"""export --to gguf: the file computes as the model does, in llama.cpp where that is installed."""

import json
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import headprune
from headprune.config import ExportConfig
from headprune.errors import HeadpruneError, PlanError, ProofError
from headprune.formats.export import FORMATS
from headprune.formats.gguf_tokenizer import RULES, recognised
from headprune.formats.source import open_source
from headprune.surgery.cut import cut_heads, resolve
from headprune.surgery.layer_windows import with_windows
from tests import gguf_words, tiny
from tests.cutting import ragged_plan, uneven_plan

gguf = pytest.importorskip("gguf")
file = pytest.importorskip("headprune.formats.gguf_file")
engine = pytest.mark.skipif(find_spec("xllamacpp") is None, reason="llama.cpp is not installed")

CUTS = {
    "whole": None,
    "uneven": lambda model: uneven_plan(model, 1),
    "first-layer-empty": lambda model: uneven_plan(model, 0),
    "ragged": ragged_plan,
}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **{"original_max_position_embeddings": 64, "rope_theta": 10_000.0},
}

WINDOWED = ["sliding_attention", "full_attention"] * 2


def saved(model, cut, folder, rule="GPT-2"):
    plan = CUTS[cut]
    if plan is not None:
        cut_heads(model, resolve(plan(model), model, ragged=True))
    model.save_pretrained(folder)
    if rule is not None:
        gguf_words.words(rule).save_pretrained(folder)
    return folder


def tiny_model(case, cut, folder, rule="GPT-2", **config):
    model = tiny.model(case)
    model.resize_token_embeddings(gguf_words.SIZE)
    model.config.update({"sliding_window": None, **config})
    return saved(model, cut, folder, rule)


def qwen3(cut, folder):
    """Norms of q and k, and tied embeddings."""
    config = Qwen3Config(
        **{"vocab_size": gguf_words.SIZE, "hidden_size": 48, "intermediate_size": 64},
        **{"num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 3},
        **{"head_dim": 10, "max_position_embeddings": 128, "initializer_range": 0.2},
        tie_word_embeddings=True,
    )
    return saved(Qwen3ForCausalLM(config).eval(), cut, folder)


@engine
@pytest.mark.process
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("case", ["llama-gqa", "llama-mha", "mistral", "qwen2", "qwen3"])
def test_the_engine_computes_as_torch_does(case, cut, tmp_path):
    folder = tmp_path / "m"
    folder = qwen3(cut, folder) if case == "qwen3" else tiny_model(case, cut, folder)
    proof = headprune.export(folder, tmp_path / "out", to="gguf").record.proof
    assert proof.how == "engine" and "xllamacpp" in proof.engine
    equal = int(proof.details["greedy tokens equal"])
    assert proof.difference < 1e-3 and f"in {equal} greedy steps" in proof.compared
    assert equal == 64 or case == "qwen3"  # which has random weights
    if case == "qwen3":
        reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
        arch = reader.get_field("general.architecture").contents()
        assert arch == ("openelm" if cut in ("uneven", "first-layer-empty") else "qwen3")


def windowed(case, folder, **config):
    """A model whose second and fourth layer see 8 tokens; a Mistral may have a window in all."""
    tiny_model(case, "whole", folder, **config)
    if "sliding_window" in config:
        return folder
    plain = with_windows(AutoConfig.from_pretrained(folder), {1, 3}, 8)
    plain.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[plain.model_type]]
    plain.save_pretrained(folder)
    return folder


@engine
@pytest.mark.process
@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("llama-mha", {"attention_bias": False}),
        ("mistral", {}),
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {}),
        ("llama-mha", {"attention_bias": False, "rope_parameters": LLAMA3}),
    ],
)
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_the_engine_computes_windows_of_layers(case, config, dtype, tmp_path, monkeypatch):
    out, how = tmp_path / "out", {"to": "gguf", "out_dtype": dtype}
    done = headprune.export(windowed(case, tmp_path / "m", **config), out, **how)
    proof = done.record.proof
    assert proof.how == "engine" and proof.difference < (1e-3 if dtype == "auto" else 0.05)
    assert dtype != "auto" or proof.details["greedy tokens equal"] == 64
    assert "sink logit per head" in done.record.changes[0]
    fields = gguf.GGUFReader(out / "model.gguf").get_field
    pattern = fields("granite_swa.attention.sliding_window_pattern").contents()
    assert pattern == ([True] * 4 if "sliding_window" in config else [False, True] * 2)
    monkeypatch.setattr(file, "windowed_layers", lambda config: [True, False] * 2)
    with pytest.raises(ProofError, match="compute something else"):
        headprune.export(tmp_path / "m", tmp_path / "wrong", **how)


@engine
@pytest.mark.process
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "q8_0"])
def test_rounded_weights_are_proven_in_the_engine(dtype, tmp_path):
    folder = tiny_model("llama-gqa", "uneven", tmp_path / "m")
    done = headprune.export(folder, tmp_path / "out", to="gguf", out_dtype=dtype)
    proof = done.record.proof
    assert proof.how == "engine" and proof.difference < proof.tolerance < 0.05
    assert proof.details["greedy tokens equal"] > 48


@engine
@pytest.mark.process
@pytest.mark.parametrize("dtype", ["auto", "float16", "bfloat16", "q8_0"])
def test_the_engine_notices_a_head_out_of_place(dtype, tmp_path, monkeypatch):
    folder = tiny_model("llama-gqa", "uneven", tmp_path / "m")
    monkeypatch.setattr(file, "neighbouring", lambda rows, heads: rows.roll(10, 0))
    monkeypatch.setattr(file, "by_halves", lambda rows, heads: rows.roll(-10, 0))
    with pytest.raises(ProofError, match="compute something else"):
        headprune.export(folder, tmp_path / "out", to="gguf", out_dtype=dtype)
    assert not (tmp_path / "out").exists()


@engine
@pytest.mark.process
@pytest.mark.parametrize("rule", RULES)
def test_the_engine_cuts_text_as_the_tokenizer_does(rule, tmp_path, monkeypatch):
    folder = tiny_model("llama-gqa", "whole", tmp_path / "m", rule)
    assert headprune.export(folder, tmp_path / "out", to="gguf").record.proof.how == "engine"
    if rule == "Qwen 2":
        monkeypatch.setitem(RULES, rule, replace(RULES[rule], name="gpt-2"))
        with pytest.raises(ProofError, match="other tokens than the tokenizer"):
            headprune.export(folder, tmp_path / "wrong", to="gguf")


def test_an_engine_that_hangs_is_no_proof(tmp_path, monkeypatch):
    llama_cpp = pytest.importorskip("headprune.formats.llama_cpp")
    (tmp_path / "hangs.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(llama_cpp.llama_cpp_process, "__file__", str(tmp_path / "hangs.py"))
    monkeypatch.setattr(llama_cpp, "_PATIENCE_S", 0.2)
    source = open_source(tiny.save(tiny.model("llama-gqa"), tmp_path / "llama"))
    with pytest.raises(ProofError, match=r"not done with 64 tokens after 0 s.*--prove read-back"):
        llama_cpp.prove(source, tmp_path / "model.gguf", gguf.GGMLQuantizationType.F32, False)


@engine
@pytest.mark.process
def test_a_file_that_the_engine_does_not_load_is_no_proof(tmp_path):
    llama_cpp = pytest.importorskip("headprune.formats.llama_cpp")
    folder = tiny_model("llama-gqa", "whole", tmp_path / "m")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" * 100)
    with pytest.raises(ProofError, match="llama.cpp cannot run the file: .*rror"):
        llama_cpp.prove(open_source(folder), tmp_path / "model.gguf", file.Type.F32, True)


@pytest.mark.parametrize("dtype", ["auto", "float16", "bfloat16", "q8_0"])
@pytest.mark.parametrize("case", ["llama-gqa", "qwen2"])
def test_files_are_read_back_bit_by_bit(case, dtype, tmp_path):
    folder, out = tiny_model(case, "uneven", tmp_path / "m"), tmp_path / "out"
    settings = {"to": "gguf", "out_dtype": dtype, "prove": "read-back"}
    proof = headprune.export(folder, out, **settings).record.proof
    assert proof.how == "read back" and proof.difference == proof.tolerance == 0
    assert "as --prove read-back was given" in str(proof)
    reader = gguf.GGUFReader(out / "model.gguf")
    assert reader.get_field("general.architecture").contents() == "deci"
    counts = reader.get_field("deci.attention.head_count").contents()
    # llama-gqa has output biases, which llama.cpp leaves out with the heads: a zero head stays
    assert counts == ([4, 1, 2, 2] if case == "llama-gqa" else [4, 0, 2, 2])
    tensor = next(t for t in reader.tensors if t.name == "blk.0.attn_q.weight")
    damaged = bytearray((out / "model.gguf").read_bytes())
    damaged[int(tensor.data_offset) + 1] ^= 64
    (out / "model.gguf").write_bytes(damaged)
    config = ExportConfig(**settings)
    assert not FORMATS["gguf"].prove(open_source(folder), out, config).passed


def test_the_reason_why_no_engine_ran_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr("headprune.formats.gguf.missing", lambda *modules: [*modules])
    folder = tiny_model("llama-gqa", "whole", tmp_path / "m")
    proof = headprune.export(folder, tmp_path / "out", to="gguf").record.proof
    assert proof.how == "read back" and proof.why_not == "xllamacpp is not installed"


def test_a_tensor_is_permuted_by_the_heads_of_its_layer():
    rows = torch.arange(24).view(24, 1)
    moved = file.neighbouring(rows, 3)
    assert moved[:8, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert torch.equal(file.by_halves(moved, 3), rows)
    assert not torch.equal(file.by_halves(moved, 2), rows)


def test_llama_3_scales_frequencies_as_transformers_does(tmp_path):
    folder = tiny_model("llama-gqa", "uneven", tmp_path / "m", rope_parameters=LLAMA3)
    source = open_source(folder)
    factors = file.rope_factors(source)
    scaled = source.load().model.rotary_emb.inv_freq
    plain = 10_000.0 ** -(torch.arange(0, 10, 2) / 10)
    assert torch.allclose(plain / factors, scaled, rtol=1e-5)
    assert not torch.allclose(plain, scaled, rtol=1e-2)
    assert headprune.export(folder, tmp_path / "out", to="gguf").record.proof.passed
    tensors = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    assert torch.equal(torch.tensor(tensors["rope_freqs.weight"]), factors)


@pytest.mark.parametrize("rule", RULES)
def test_rules_are_recognised_for_certain(rule):
    content = json.loads(gguf_words.words(rule).backend_tokenizer.to_str())
    assert recognised(content) == RULES[rule]
    model = content["model"]
    for changed in (
        {"model": {**model, "vocab": dict([*model["vocab"].items()][20:])}},
        {"model": {**model, "ignore_merges": not RULES[rule].ignores_merges}},
        {"normalizer": {"type": "Lowercase"}},
    ):
        assert recognised({**content, **changed}) is None


def test_the_tokenizer_of_another_file_is_taken_over(tmp_path):
    whole, out = tiny_model("llama-gqa", "whole", tmp_path / "m"), tmp_path / "whole"
    headprune.export(whole, out, to="gguf", prove="read-back")
    cut = tiny_model("llama-gqa", "uneven", tmp_path / "cut", rule=None)
    like = out / "model.gguf"
    headprune.export(cut, tmp_path / "cut-out", to="gguf", like=like, prove="read-back")
    one, two = (gguf.GGUFReader(f / "model.gguf").fields for f in (out, tmp_path / "cut-out"))
    names = [name for name in one if name.startswith("tokenizer.")]
    assert len(names) > 6
    for name in names:
        assert one[name].contents() == two[name].contents(), name
    tiny.model("llama-gqa").save_pretrained(tmp_path / "small")
    (tmp_path / "cut.gguf").write_bytes(like.read_bytes()[:300])
    for file_, message in (
        (tmp_path / "none", "There is no file"),
        (tmp_path / "cut.gguf", "cannot be read as GGUF"),
        (like, "has a vocabulary of 310 tokens, and the model one of 65"),
    ):
        with pytest.raises(HeadpruneError, match=message):
            headprune.export(tmp_path / "small", tmp_path / "x", to="gguf", like=file_)
        assert not (tmp_path / "x").exists()


def test_a_tokenizer_that_is_unknown_or_of_a_larger_model_is_refused(tmp_path):
    unknown = tiny.save(tiny.model("llama-gqa"), tmp_path / "m")
    larger = tiny_model("llama-gqa", "whole", tmp_path / "larger")
    tiny.model("llama-gqa").save_pretrained(larger)  # with fewer tokens
    for folder, message in (
        (unknown, "none of the known rules.*: give --like FILE"),
        (larger, "has 267 tokens, and the model embeds 65"),
    ):
        with pytest.raises(HeadpruneError, match=message):
            headprune.export(folder, tmp_path / "out", to="gguf")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("case", "cut", "config", "message"),
    [
        ("bert-mlm", "whole", {}, "its model_type is bert, and GGUF is written of llama"),
        ("mistral", "uneven", {"sliding_window": 8}, "equal heads in all"),
        (
            "llama-gqa",
            "whole",
            {"layer_types": WINDOWED, "sliding_window": 8},
            '"model_type": "ministral"',
        ),
        (
            "smollm3",
            "whole",
            {"layer_types": WINDOWED, "sliding_window": 8},
            "this is a smollm3: vLLM takes them",
        ),
        ("llama-gqa", "whole", {"hidden_act": "gelu"}, "activation gelu"),
        ("qwen3", "whole", {}, "has biases"),
        (
            "qwen3",
            "uneven",
            {"attention_bias": False, "tie_word_embeddings": False},
            "openelm.*--for llama.cpp",
        ),
    ],
)
def test_a_model_without_an_architecture_is_refused(case, cut, config, message, tmp_path):
    folder = tiny_model(case, cut, tmp_path / "m", **config)
    with pytest.raises(PlanError, match=message):
        headprune.export(folder, tmp_path / "out", to="gguf")
    assert not (tmp_path / "out").exists()


def test_a_weight_beyond_float16_is_refused(tmp_path):
    model = tiny.model("llama-gqa")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e5
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(HeadpruneError, match="would overflow"):
        headprune.export(tmp_path / "m", tmp_path / "out", to="gguf", out_dtype="float16")
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # of NumPy, to int8
def test_nan_is_no_proof(tmp_path):
    model = tiny.model("llama-gqa", torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 3] = float("nan")
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(ProofError, match="nan apart"):
        headprune.export(tmp_path / "m", tmp_path / "out", to="gguf", out_dtype="q8_0")
    assert not (tmp_path / "out").exists()
