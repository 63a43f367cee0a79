"""Settings as the files of a model have them: tied embeddings, and names of older readers."""

import json
from itertools import product

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import headprune
from headprune.errors import ProofError
from headprune.formats import gguf_file
from headprune.model.attention import attention_of
from tests import tiny

HEAD = {"bert-mlm": "cls.predictions.decoder.weight", "t5": "lm_head.weight"}
TIED = ["llama-gqa", "gpt2", "gemma3_text", "gemma3", "bert-mlm", "t5"]


def without_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    return folder


def settings(folder):
    return json.loads((folder / "config.json").read_text())


def with_own_head(case, folder, flag=True):
    """A folder whose file holds an output embedding, whatever its config says, as after PEFT."""
    tied = {} if case == "gemma3" else {"tie_word_embeddings": True}
    net = tiny.model(case, **tied)
    tiny.save(net, folder)
    weights = load_file(folder / "model.safetensors")
    name = HEAD.get(case, "lm_head.weight")
    torch.manual_seed(7)
    head = torch.randn_like(net.get_output_embeddings().weight)
    save_file({**weights, name: head}, folder / "model.safetensors", {"format": "pt"})
    if case not in ("t5", "bert-mlm"):  # ignored there, or the tie of a bias as well
        content = {**settings(folder), "tie_word_embeddings": flag}
        (folder / "config.json").write_text(json.dumps(content))
    return head


def first_heads(folder):
    attentions = attention_of(headprune.from_pretrained(folder))
    return {a.path: list(range(a.query_heads // a.kv_heads)) for a in attentions}


def reloaded(folder):
    name = settings(folder)["architectures"][0]
    cut = "headprune" in settings(folder)
    load = headprune.from_pretrained if cut else getattr(transformers, name).from_pretrained
    return load(folder)


@pytest.mark.parametrize(
    ("case", "flag"), [*product(TIED[:4], [True, False]), *((case, True) for case in TIED[4:])]
)
def test_a_result_keeps_an_output_embedding_that_a_flag_denies(case, flag, tmp_path):
    head = with_own_head(case, tmp_path / "model", flag)
    wanted = reloaded(tmp_path / "model")
    assert torch.equal(wanted.get_output_embeddings().weight, head)  # as transformers reads it
    headprune.prune(tmp_path / "model", tmp_path / "out", plan=first_heads(tmp_path / "model"))
    net = reloaded(tmp_path / "out")
    assert torch.equal(net.get_output_embeddings().weight, head)
    pairs = (n.get_input_embeddings().weight for n in (net, wanted))
    assert torch.equal(*pairs)


@pytest.mark.parametrize("command", ["convert_gqa", "pad", "heal"])
def test_every_writer_keeps_it(command, tmp_path):
    head = with_own_head("llama-gqa", tmp_path / "model")
    model, out = tmp_path / "model", tmp_path / "out"
    if command == "convert_gqa":
        headprune.convert_gqa(model, out, kv_heads=1, merge="mean")
    elif command == "pad":
        headprune.pad(model, out, multiple_of=4)
    else:
        (tmp_path / "text.txt").write_text(tiny.text(3000))
        tiny.healed(model, model, out, tmp_path / "text.txt", steps=1)
    net = AutoModelForCausalLM.from_pretrained(out)
    assert net.lm_head.weight is not net.model.embed_tokens.weight
    gap = float((net.lm_head.weight.detach() - head).abs().max())
    assert gap == 0 if command != "heal" else gap < 1
    assert settings(out)["tie_word_embeddings"] is False  # transformers 4 believes it


def test_gpt2_with_its_own_output_embedding_becomes_gpt_bigcode(tmp_path):
    head = with_own_head("gpt2", tmp_path / "model")
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    headprune.convert_gqa(tmp_path / "model", tmp_path / "mqa", kv_heads=1, merge="mean")
    net = AutoModelForCausalLM.from_pretrained(tmp_path / "mqa")
    assert type(net).__name__ == "GPTBigCodeForCausalLM"
    assert torch.equal(net.lm_head.weight, head)
    assert torch.equal(net.transformer.wte.weight, wanted.transformer.wte.weight)


@pytest.mark.parametrize("to", ["onnx", "openvino"])
def test_graphs_have_it(to, tmp_path):
    pytest.importorskip({"onnx": "onnxruntime", "openvino": "openvino"}[to])
    with_own_head("llama-gqa", tmp_path / "model")
    out = headprune.export(tmp_path / "model", tmp_path / "out", to=to)
    assert out.record.proof.difference < 1e-4  # against transformers, which keeps it


def test_gguf_has_it_or_has_no_proof(tmp_path, monkeypatch):
    head = with_own_head("llama-gqa", tmp_path / "model")
    without_tokenizer(tmp_path / "model")
    headprune.export(tmp_path / "model", tmp_path / "out", to="gguf", prove="read-back")
    read = {t.name: t for t in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    assert torch.equal(torch.from_numpy(read["output.weight"].data.copy()), head)
    tensors = gguf_file._tensors

    def without(*given):
        return {name: parts for name, parts in tensors(*given).items() if name != "output.weight"}

    monkeypatch.setattr(gguf_file, "_tensors", without)
    with pytest.raises(ProofError, match="lacks the output embedding"):
        headprune.export(tmp_path / "model", tmp_path / "lost", to="gguf", prove="read-back")


# the rotary embedding in the names of transformers 4 (4.57.3), and the same in those of 5
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
DEFAULT = {"rope_type": "default"}
SPELLINGS = {
    "default": ("llama-gqa", {"rope_theta": 5e5}, {**DEFAULT, "rope_theta": 5e5}),
    "llama3": (
        "llama-gqa",
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {**LLAMA3, "rope_theta": 5e5},
    ),
    "yarn": ("qwen3", {"rope_theta": 1e6, "rope_scaling": YARN}, {**YARN, "rope_theta": 1e6}),
    "longrope": (
        "phi3",
        {
            **{"rope_theta": 2e4, "partial_rotary_factor": 1.0},
            "rope_scaling": {"type": "longrope", **LONG},
        },
        {**LONG, "rope_type": "longrope", "rope_theta": 2e4, "partial_rotary_factor": 1.0},
    ),
    "partial": (
        "stablelm",
        {"rope_theta": 2e4, "partial_rotary_factor": 0.6},
        {**DEFAULT, "rope_theta": 2e4, "partial_rotary_factor": 0.6},
    ),
    "neox": (
        "gpt_neox",
        {"rotary_emb_base": 2e4, "rotary_pct": 0.5},
        {**DEFAULT, "rope_theta": 2e4, "partial_rotary_factor": 0.5},
    ),
    "gemma3": (
        "gemma3_text",
        {
            **{"rope_theta": 2e6, "rope_local_base_freq": 2e4},
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
            "sliding_attention": {**DEFAULT, "rope_theta": 2e4},
        },
    ),
    "modernbert": (
        "modernbert",
        {"global_rope_theta": 2e6, "local_rope_theta": 2e4},
        {
            "full_attention": {**DEFAULT, "rope_theta": 2e6},
            "sliding_attention": {**DEFAULT, "rope_theta": 2e4},
        },
    ),
}


def spelled(kind, folder, older):
    """A model whose config.json has one of the two spellings alone."""
    case, before, now = SPELLINGS[kind]
    more = {"original_max_position_embeddings": 16} if kind == "longrope" else {}
    tiny.save(tiny.model(case, rope_parameters=json.loads(json.dumps(now)), **more), folder)
    content = settings(folder)
    assert content.pop("rope_parameters") == {**now, **more}
    content |= before if older else {"rope_parameters": {**now, **more}}
    if older:
        content["torch_dtype"] = content.pop("dtype")
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("older", [True, False], ids=["of 4", "of 5"])
@pytest.mark.parametrize("kind", SPELLINGS)
def test_a_result_says_its_rotary_embedding_to_older_readers(kind, older, tmp_path):
    model = spelled(kind, tmp_path / "model", older)
    headprune.prune(model, tmp_path / "out", plan=first_heads(model))
    found, source = settings(tmp_path / "out"), settings(model)
    before = SPELLINGS[kind][1]
    assert {name: found.get(name) for name in before} == before
    given, read = (AutoConfig.from_pretrained(f).rope_parameters for f in (model, tmp_path / "out"))
    kept = [{n: v for n, v in each.items() if n != "type"} for each in (given, read)]
    assert kept[0] == kept[1]
    if older:  # what transformers 4 wrote stands as it was
        assert found["torch_dtype"] == source["torch_dtype"]
        assert "rope_parameters" not in found


@pytest.mark.parametrize("command", ["convert_gqa", "pad", "gguf", "vllm", "convert_mla"])
def test_every_writer_says_it(command, tmp_path):
    model, out = spelled("default", tmp_path / "model", False), tmp_path / "out"
    if command == "convert_gqa":
        headprune.convert_gqa(model, out, kv_heads=1, merge="mean")
    elif command == "pad":
        headprune.pad(model, out, multiple_of=4)
    elif command == "convert_mla":
        (tmp_path / "text.txt").write_text(tiny.text(3000))
        how = {"rank": 8, "rope_dim": 4, "seq_len": 64}
        headprune.convert_mla(model, out, data=tmp_path / "text.txt", **how)
    else:
        headprune.export(without_tokenizer(model), out, to=command)
    assert settings(out)["rope_theta"] == settings(out)["rope_parameters"]["rope_theta"]


def test_settings_of_the_source_stand_as_they_were(tmp_path):
    model = tiny.save(tiny.model("gpt2"), tmp_path / "model")
    content = settings(model)
    content["num_attention_heads"] = content.pop("n_head")  # an alias, which transformers reads
    content |= {"transformers_version": "4.30.0", "torch_dtype": content.pop("dtype")}
    content |= {"task_specific_params": {"text-generation": {"max_length": 50}}}
    (model / "config.json").write_text(json.dumps(content))
    headprune.prune(model, tmp_path / "out", plan=first_heads(model))
    found = settings(tmp_path / "out")
    assert {name: found[name] for name in content} == content
    assert headprune.verify(tmp_path / "out", against=model).passed
