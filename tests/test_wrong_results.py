"""Results with one wrong value: none has a proof, when it is written or afterwards."""

import json
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch

import headprune
from headprune.errors import ProofError
from headprune.formats import pad, vllm
from headprune.io.folders import hashes_of
from headprune.model import probes
from headprune.model.attention import attention_of
from headprune.proof import equivalence
from headprune.result import write as writing
from headprune.result.verify import verify
from headprune.schemas.manifest import amend_manifest, contents, read_manifest
from headprune.surgery.cut import cut_heads, uncut
from tests import tiny
from tests.damage import of

_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
_LLAVA_ID = 7  # of an image in a text


def model(case):
    """A tiny model with windows, or with images in its texts."""
    settings = {
        "mistral": {"sliding_window": 64},
        "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
        "gemma2": {"layer_types": ["sliding_attention", "full_attention"] * 2},
        "llava": {"image_token_id": _LLAVA_ID},
        "qwen2": tiny.WINDOWS["sliding_first"],
    }
    return tiny.model(case, **settings.get(case, {}))


def setting(value, *names):
    """Change a setting of config.json."""

    def harm(content):
        for name in names[:-1]:
            content = content[name]
        assert content.get(names[-1]) != value
        content[names[-1]] = value

    return of("config.json", harm)


def gone(name):
    """Take a setting out of config.json."""
    return of("config.json", lambda content: content.pop(name))


def number(name):
    """Change one number of a tensor, the last, by half of it."""

    def harm(weights):
        full = next(each for each in sorted(weights) if name in each)
        weights[full].view(-1)[-1] += 0.5 + weights[full].view(-1)[-1] / 2

    return of("model.safetensors", harm)


def text_in(file):
    """Change a file beside the weights."""
    return lambda folder: (folder / file).write_text((folder / file).read_text() + "\n ")  # type: ignore[return-value]


SETTINGS = [
    ("mistral", setting(32, "sliding_window")),
    ("mistral", setting(None, "sliding_window")),
    ("llama-gqa", setting(_DYNAMIC, "rope_parameters")),
    ("llama-gqa", setting(1e5, "rope_parameters", "rope_theta")),
    ("llama-gqa", setting(1e5, "rope_theta")),
    ("llama-gqa", gone("rope_theta")),
    ("llama-gqa", setting(1e-5, "rms_norm_eps")),
    ("llama-gqa", setting("gelu", "hidden_act")),
    ("llama-gqa", setting(64, "max_position_embeddings")),
    ("llama-gqa", setting(True, "tie_word_embeddings")),
    ("llama-gqa", setting("float16", "dtype")),
    ("llama-gqa", setting(5, "eos_token_id")),
    ("llama-gqa", setting(0.5, "attention_dropout")),
    ("llama-gqa", setting(8, "head_dim")),
    ("qwen2", setting(["full_attention"] * 4, "layer_types")),
    ("qwen2", setting(9, "sliding_window")),
    ("gemma3_text", setting(20, "query_pre_attn_scalar")),
    ("gemma3_text", setting(2e4, "rope_parameters", "sliding_attention", "rope_theta")),
    ("gemma3_text", setting(30.0, "final_logit_softcapping")),
    ("gemma2", setting(49.0, "attn_logit_softcapping")),
    ("granite", setting(2.0, "attention_multiplier")),
    ("gpt2", setting(False, "scale_attn_weights")),
    ("gpt2", setting("relu", "activation_function")),
    ("bert-mlm", setting(1e-3, "layer_norm_eps")),
    ("bert-mlm", setting("relu", "hidden_act")),
    ("llava", setting(1e-2, "vision_config", "layer_norm_eps")),
    ("llava", setting(-1, "vision_feature_layer")),
    ("llava", setting(8, "image_token_id")),
    ("gpt_oss", setting(4.0, "rope_parameters", "factor")),
    ("gpt_oss", setting(1, "num_experts_per_tok")),
]
TENSORS = [
    *(("llama-gqa", number(f"1.self_attn.{name}_proj.{kind}")) for name, kind in (
        *(("q", "weight"), ("k", "weight"), ("v", "weight"), ("o", "weight")),
        *(("q", "bias"), ("k", "bias"), ("v", "bias"), ("o", "bias"))
    )),
    *(("llama-gqa", number(name)) for name in (
        *("mlp.gate_proj", "mlp.down_proj", "input_layernorm", "model.norm"),
        *("embed_tokens", "lm_head")
    )),
    *(("qwen3", number(name)) for name in ("q_norm", "k_norm")),
    *(("gpt2", number(name)) for name in ("wte", "wpe", "ln_f", "c_fc.bias")),
    *(("bert-mlm", number(name)) for name in ("token_type", "position_emb", "predictions.bias")),
    *(("llava", number(name)) for name in ("patch_embedding", "vision_tower", "projector")),
    *(("gpt_oss", number(name)) for name in ("sinks", "router", "experts"))
]  # fmt: skip
FILES = [("llama-gqa", text_in("tokenizer.json")), ("llama-gqa", setting(9, "pad_token_id"))]
WRONG = [*SETTINGS, *TENSORS, *FILES]


def cut(base, out):
    """A result without the first KV group of every module, or its first head."""
    attentions = attention_of(headprune.from_pretrained(base))
    first = {a.path: list(range(a.query_heads // a.kv_heads)) for a in attentions}
    return headprune.prune(base, out, plan=first).output


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A model and a right result of every case, made once."""

    @cache
    def made(case):
        folder = tmp_path_factory.mktemp(case)
        base = tiny.save(model(case), folder / "model")
        return base, cut(base, folder / "out")

    return made


Results = Callable[[str], tuple[Path, Path]]


@pytest.mark.parametrize("case", sorted({case for case, _ in WRONG}))
def test_a_right_result_has_a_proof(case, results):
    base, out = results(case)
    assert verify(out, against=base).passed


@pytest.mark.parametrize(("case", "harm"), WRONG)
def test_a_wrong_result_has_no_proof(case, harm, results, tmp_path, monkeypatch):
    base, right = results(case)
    out = tmp_path / "out"
    shutil.copytree(right, out)
    harm(out)
    manifest = read_manifest(out)  # made to fit, as by someone who knows how
    monkeypatch.setattr(type(manifest), "digest", lambda self: manifest.id)
    amend_manifest(out, files=hashes_of(out, contents(out)))
    verification = verify(out, against=base)
    assert verification.checks[0].passed
    assert not verification.passed


@pytest.mark.parametrize(
    ("case", "harm"),
    [SETTINGS[0], SETTINGS[2], *(row for row in TENSORS if row[0] == "llava"), *FILES],
)
def test_a_wrong_result_is_not_written(case, harm, results, tmp_path, monkeypatch):
    base, _ = results(case)
    taken = writing._take_over

    def wrongly(folder, *rest):
        taken(folder, *rest)
        harm(folder)

    monkeypatch.setattr(writing, "_take_over", wrongly)
    with pytest.raises(ProofError, match="The proof failed"):
        cut(base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _window(net):
    for module in net.modules():
        if getattr(module, "sliding_window", None):
            module.sliding_window = 32
    net.config.sliding_window = 32


def _theta(kind, net):
    for module in net.modules():
        if hasattr(module, "long_inv_freq"):
            module.long_inv_freq = module.long_inv_freq * 1.01
    net.config.rope_parameters["factor"] = 5.0


@torch.no_grad()
def _tower(name, net):
    for full, parameter in net.named_parameters():
        if name in full:
            parameter.normal_(0, 0.1)


_ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    "longrope": {
        **{"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0},
        **{"short_factor": [1.0] * 5, "long_factor": [3.0] * 5},
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize(
    ("case", "settings", "harm"),
    [
        ("mistral", {"sliding_window": 4096}, _window),
        ("llama-gqa", {"rope_parameters": _ROPES["dynamic"]}, partial(_theta, "dynamic")),
        ("llama-gqa", {"rope_parameters": _ROPES["longrope"]}, partial(_theta, "longrope")),
        ("llava", {}, partial(_tower, "vision_tower.")),
        ("llava", {}, partial(_tower, "multi_modal_projector.")),
    ],
    ids=["window", "dynamic", "longrope", "tower", "projector"],
)
def test_probes_reach_windows_ropes_and_towers(case, settings, harm):
    net = tiny.model(case, **json.loads(json.dumps(settings)))
    cuts = [uncut(attention) for attention in attention_of(net)]
    expected = equivalence.expect(net, cuts)
    assert expected.unreached == ()
    cut_heads(net, cuts)
    assert equivalence.conclude(expected, probes.probe(net, expected.inputs)).passed
    harm(net)
    with pytest.raises(ProofError, match="nothing was written"):
        equivalence.conclude(expected, probes.probe(net, expected.inputs))


def test_what_no_probe_reached_is_said(tmp_path, monkeypatch):
    from headprune.render import records

    monkeypatch.setattr(probes, "_WORK", 0)
    base = tiny.save(tiny.model("mistral", sliding_window=64), tmp_path / "model")
    out = cut(base, tmp_path / "out")
    proof = read_manifest(out).proof
    assert proof.unreached == ("positions after 64 (sliding_window)",)
    assert "Not run: positions after 64" in str(records.proof(read_manifest(out)))
    assert verify(out).passed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_are_compared_in_half_precision(dtype, tmp_path):
    base = tiny.save(model("llava").to(dtype), tmp_path / "model")
    out = cut(base, tmp_path / "out")
    number("vision_tower")(out)
    checks = {check.name: check for check in verify(out, against=base).checks}
    assert "vision_tower" in checks[f"what stays of {base}"].found


@pytest.mark.parametrize(
    "harm", [setting(1e-3, "rms_norm_eps"), setting(7.0, "rope_theta"), number("mlp.gate_proj")]
)
@pytest.mark.parametrize("to", ["pad", "vllm"])
def test_a_wrong_folder_for_an_engine_has_no_proof(to, harm, llama_folder, tmp_path, monkeypatch):
    module = {"pad": pad, "vllm": vllm}[to]
    write = module.write_checkpoint

    def wrongly(source, folder, *rest):
        write(source, folder, *rest)
        harm(folder)

    monkeypatch.setattr(module, "write_checkpoint", wrongly)
    call = partial(headprune.export, to="vllm")
    call = partial(headprune.pad, multiple_of=4) if to == "pad" else call
    with pytest.raises(ProofError):
        call(llama_folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_a_merge_leaves_alone_is_compared(llama_folder, tmp_path):
    out = tmp_path / "out"
    headprune.convert_gqa(llama_folder, out, kv_heads=1, merge="mean")
    assert verify(out, against=llama_folder).passed
    number("mlp.gate_proj")(out)
    checks = verify(out, against=llama_folder).checks
    assert not checks[-1].passed
    assert "mlp.gate_proj" in checks[-1].found
