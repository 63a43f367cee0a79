"""export --to gguf: the file says what the model computes, in llama.cpp where that is installed."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import headprune
from headprune.errors import HeadpruneError, PlanError, ProofError
from headprune.exporting.formats import FORMATS
from headprune.exporting.llama_cpp import layout, tokenizer
from headprune.exporting.llama_cpp.tokenizer import RULES
from headprune.exporting.source import ExportSource, open_source
from headprune.surgery.cut import cut_heads, resolve
from tests import gguf_words, tiny
from tests.cutting import ragged_plan, uneven_plan

gguf = pytest.importorskip("gguf")
file = pytest.importorskip("headprune.exporting.llama_cpp.file")
engine = pytest.mark.skipif(find_spec("xllamacpp") is None, reason="llama.cpp is not installed")

CUTS: dict[str, Callable[[PreTrainedModel], Any] | None] = {
    "whole": None,
    "uneven": lambda model: uneven_plan(model, 1),
    "first-layer-empty": lambda model: uneven_plan(model, 0),
    "ragged": ragged_plan,
}


def made(case: str, cut: str, folder: Path, rule: str | None = "GPT-2", **config: Any) -> Path:
    model = tiny.model(case)
    model.resize_token_embeddings(gguf_words.SIZE)
    model.config.sliding_window = None
    model.config.update(config)
    plan = CUTS[cut]
    if plan is not None:
        cut_heads(model, resolve(plan(model), model, ragged=True))
    model.save_pretrained(folder)
    if rule is not None:
        gguf_words.words(rule).save_pretrained(folder)
    return folder


@engine
@pytest.mark.process
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("case", ["llama-gqa", "llama-mha", "mistral", "qwen2"])
def test_the_engine_computes_what_torch_does(case: str, cut: str, tmp_path: Path) -> None:
    done = headprune.export(made(case, cut, tmp_path / "m"), tmp_path / "out", to="gguf")
    proof = done.record.proof
    assert proof.how == "engine" and "xllamacpp" in proof.engine
    assert proof.difference < 1e-3 and proof.details["greedy tokens equal"] == 64


@engine
@pytest.mark.process
@pytest.mark.parametrize("cut", CUTS)
def test_norms_of_q_and_k_go_by_openelm_where_layers_differ(cut: str, tmp_path: Path) -> None:
    config = Qwen3Config(
        **{"vocab_size": gguf_words.SIZE, "hidden_size": 48, "intermediate_size": 64},
        **{"num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 3},
        **{"head_dim": 10, "max_position_embeddings": 128, "initializer_range": 0.2},
        tie_word_embeddings=True,
    )
    model, plan = Qwen3ForCausalLM(config).eval(), CUTS[cut]
    if plan is not None:
        cut_heads(model, resolve(plan(model), model, ragged=True))
    model.save_pretrained(tmp_path / "m")
    gguf_words.words().save_pretrained(tmp_path / "m")
    done = headprune.export(tmp_path / "m", tmp_path / "out", to="gguf")
    assert done.record.proof.how == "engine" and done.record.proof.difference < 1e-3
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    arch = reader.get_field("general.architecture").contents()
    assert arch == ("openelm" if cut in ("uneven", "first-layer-empty") else "qwen3")


@engine
@pytest.mark.process
@pytest.mark.parametrize("dtype", ["auto", "float16", "bfloat16", "q8_0"])
def test_the_engine_notices_a_head_out_of_place(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made("llama-gqa", "uneven", tmp_path / "m")
    written = "headprune.exporting.llama_cpp.file"
    monkeypatch.setattr(f"{written}.neighbouring", lambda rows, heads: rows.roll(10, 0))
    monkeypatch.setattr(f"{written}.by_halves", lambda rows, heads: rows.roll(-10, 0))
    with pytest.raises(ProofError, match="computes something else"):
        headprune.export(folder, tmp_path / "out", to="gguf", out_dtype=dtype)
    assert not (tmp_path / "out").exists()


@engine
@pytest.mark.process
@pytest.mark.parametrize("rule", RULES)
def test_the_engine_cuts_text_as_the_tokenizer_does(rule: str, tmp_path: Path) -> None:
    folder = made("llama-gqa", "whole", tmp_path / "m", rule)
    assert headprune.export(folder, tmp_path / "out", to="gguf").record.proof.how == "engine"


@engine
@pytest.mark.process
def test_another_rule_of_cutting_text_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made("llama-gqa", "whole", tmp_path / "m", "Qwen 2")
    right = tokenizer.vocabulary

    def wrong(source: ExportSource, like: Path | None) -> tokenizer.Vocabulary:
        fields = right(source, like).fields
        return tokenizer.Vocabulary({**fields, "tokenizer.ggml.pre": "gpt-2"})

    module = sys.modules["headprune.exporting.formats.gguf"]  # its name is that of the row, too
    monkeypatch.setattr(module, "vocabulary", wrong)
    with pytest.raises(ProofError, match="other tokens than the tokenizer"):
        headprune.export(folder, tmp_path / "out", to="gguf")


@engine
@pytest.mark.process
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "q8_0"])
def test_what_is_rounded_is_proven_in_the_engine(dtype: str, tmp_path: Path) -> None:
    folder = made("llama-gqa", "uneven", tmp_path / "m")
    done = headprune.export(folder, tmp_path / "out", to="gguf", out_dtype=dtype)
    proof = done.record.proof
    assert proof.how == "engine" and proof.difference < proof.tolerance < 0.05
    assert proof.details["greedy tokens equal"] > 48


@pytest.mark.parametrize("dtype", ["auto", "float16", "bfloat16", "q8_0"])
@pytest.mark.parametrize("case", ["llama-gqa", "qwen2"])
def test_what_is_read_back_is_what_was_written(case: str, dtype: str, tmp_path: Path) -> None:
    folder, out = made(case, "uneven", tmp_path / "m"), tmp_path / "out"
    settings = {"to": "gguf", "out_dtype": dtype, "prove": "read-back"}
    proof = headprune.export(folder, out, **settings).record.proof
    assert proof.how == "read back" and proof.passed
    reader = gguf.GGUFReader(out / "model.gguf")
    assert reader.get_field("general.architecture").contents() == "deci"
    counts = reader.get_field("deci.attention.head_count").contents()
    # llama-gqa has output biases, which llama.cpp leaves out with the heads: a zero head stays
    assert counts == ([4, 1, 2, 2] if case == "llama-gqa" else [4, 0, 2, 2])
    net = open_source(folder)
    # one byte of one tensor, and the proof sees it
    tensor = next(t for t in reader.tensors if t.name == "blk.0.attn_q.weight")
    damaged = bytearray((out / "model.gguf").read_bytes())
    damaged[int(tensor.data_offset) + 1] ^= 64
    (out / "model.gguf").write_bytes(damaged)
    config = headprune.export.options(model=folder, output=out, **settings)
    assert not FORMATS["gguf"].prove(net, out, config).passed


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-4, 1e-5, 1e-6])
def test_small_weights_are_proven_in_q8_0_as_large_ones(size: float) -> None:
    kind, weights = file.Type.Q8_0, size * torch.randn(64, 96, generator=torch.manual_seed(0))
    raw = np.frombuffer(file._encoded(weights, kind, "w"), np.uint8).copy()
    read = file._decoded(raw, kind, weights.shape)
    assert file._gap(read, weights, kind) <= file._Q8_STEP
    if size >= 1e-4:  # below, the largest number of a block is a few steps of its scale
        assert file._gap(read.roll(1, 0), weights, kind) > 10 * file._Q8_STEP
    assert math.isnan(file._gap(read * math.nan, weights, kind))


def test_a_tensor_is_permuted_by_the_heads_of_its_own_layer() -> None:
    rows = torch.arange(24).view(24, 1)
    moved = layout.neighbouring(rows, 3)
    assert moved[:8, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert torch.equal(layout.by_halves(moved, 3), rows)
    assert not torch.equal(layout.by_halves(moved, 2), rows)


def test_llama_3_scales_frequencies_as_transformers_does(tmp_path: Path) -> None:
    rope = {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        **{"original_max_position_embeddings": 64, "rope_theta": 10_000.0},
    }
    folder = made("llama-gqa", "whole", tmp_path / "m", rope_parameters=rope)
    source = open_source(folder)
    factors = layout.rope_factors(source)
    assert factors is not None
    scaled = source.load().model.rotary_emb.inv_freq
    plain = 10_000.0 ** -(torch.arange(0, 10, 2) / 10)
    assert torch.allclose(plain / factors, scaled, rtol=1e-5)
    assert not torch.allclose(plain, scaled, rtol=1e-2)


@pytest.mark.parametrize("rule", RULES)
def test_rules_are_recognised_for_certain(rule: str) -> None:
    content = json.loads(gguf_words.words(rule).backend_tokenizer.to_str())
    assert tokenizer.recognised(content) == RULES[rule]
    missing = {**content["model"], "vocab": dict([*content["model"]["vocab"].items()][20:])}
    assert tokenizer.recognised({**content, "model": missing}) is None
    assert tokenizer.recognised({**content, "normalizer": {"type": "Lowercase"}}) is None
    others = {**content["model"], "ignore_merges": not RULES[rule].ignores_merges}
    assert tokenizer.recognised({**content, "model": others}) is None


def test_the_tokenizer_of_another_file_is_taken_over(tmp_path: Path) -> None:
    whole, out = made("llama-gqa", "whole", tmp_path / "m"), tmp_path / "whole"
    headprune.export(whole, out, to="gguf", prove="read-back")
    cut = made("llama-gqa", "uneven", tmp_path / "cut", rule=None)
    like = out / "model.gguf"
    headprune.export(cut, tmp_path / "cut-out", to="gguf", like=like, prove="read-back")
    one, other = (gguf.GGUFReader(f / "model.gguf") for f in (out, tmp_path / "cut-out"))
    names = [name for name in one.fields if name.startswith("tokenizer.")]
    assert len(names) > 6
    for name in names:
        assert one.fields[name].contents() == other.fields[name].contents(), name


def damaged_like(tmp_path: Path, how: str) -> Path:
    file = tmp_path / "like.gguf"
    if how == "missing":
        return file
    out = tmp_path / "other"
    model = made("llama-gqa", "whole", tmp_path / "other-model")
    headprune.export(model, out, to="gguf", prove="read-back")
    content = bytearray((out / "model.gguf").read_bytes())
    if how == "newer":
        content[4:8] = (9).to_bytes(4, "little")
    file.write_bytes(content[:300] if how == "truncated" else content)
    return file


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "There is no file"),
        ("truncated", "cannot be read as GGUF"),
        ("newer", "cannot be read as GGUF"),
        ("other words", "has a vocabulary of 310 tokens, and the model one of 65"),
    ],
)
def test_a_file_that_is_no_original_is_refused(how: str, message: str, tmp_path: Path) -> None:
    like = damaged_like(tmp_path, how)
    tiny.model("llama-gqa").save_pretrained(tmp_path / "m")
    with pytest.raises(HeadpruneError, match=message) as told:
        headprune.export(tmp_path / "m", tmp_path / "out", to="gguf", like=like)
    assert "\n" not in str(told.value) and not (tmp_path / "out").exists()


def test_a_tokenizer_that_is_not_known_is_refused(tmp_path: Path) -> None:
    folder = tiny.save(tiny.model("llama-gqa"), tmp_path / "m")
    with pytest.raises(HeadpruneError, match="none of the rules.*: give like FILE"):
        headprune.export(folder, tmp_path / "out", to="gguf")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_a_larger_model_is_refused(tmp_path: Path) -> None:
    folder = made("llama-gqa", "whole", tmp_path / "m")
    tiny.model("llama-gqa").save_pretrained(folder)  # with fewer tokens
    with pytest.raises(HeadpruneError, match="has 267 tokens, and the model embeds 65"):
        headprune.export(folder, tmp_path / "out", to="gguf")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("case", "cut", "config", "message"),
    [
        ("bert-mlm", "whole", {}, "its model_type is bert, and GGUF is written of llama"),
        ("mistral", "whole", {"sliding_window": 8}, "sliding window"),
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
def test_what_no_architecture_holds_is_refused(
    case: str, cut: str, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = made(case, cut, tmp_path / "m", **config)
    with pytest.raises(PlanError, match=message):
        headprune.export(folder, tmp_path / "out", to="gguf")
    assert not (tmp_path / "out").exists()


def test_a_weight_beyond_float16_is_refused(tmp_path: Path) -> None:
    model = tiny.model("llama-gqa")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e5
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(HeadpruneError, match="would overflow"):
        headprune.export(tmp_path / "m", tmp_path / "out", to="gguf", out_dtype="float16")
    assert not (tmp_path / "out").exists()
