"""export --to vllm: a folder that passes vLLM's checks of a model."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import headprune
from headprune.config import ExportConfig
from headprune.errors import PlanError, ProofError
from headprune.formats.export import FORMATS
from headprune.formats.source import open_source
from headprune.surgery.cut import cut_heads, resolve
from tests import tiny
from tests.cutting import ragged_plan, uneven_plan
from tests.test_regularise import IDS, cut, shaped


@pytest.mark.parametrize("shape", ["ragged", "empty", "uneven", "whole"])
@pytest.mark.parametrize("case", ["llama-gqa", "qwen2"])
def test_the_folder_computes_the_same_and_dispatches_every_layer(case, shape, tmp_path):
    folder, out = tmp_path / "m", tmp_path / "out"
    model = shaped(folder, case, shape)
    record = headprune.export(folder, out, to="vllm").record
    assert record.proof.passed and bool(record.changes) == (shape in ("ragged", "empty"))
    served = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert (served(IDS).logits - model(IDS).logits).abs().max() < 1e-12
    config = json.loads((out / "config.json").read_text())
    assert "skip" not in json.dumps(config.get("per_layer_config"))
    assert (out / "modeling_headprune.py").is_file() == (shape != "whole")
    if shape in ("ragged", "empty"):  # as it is without zero heads
        given = ExportConfig(to="vllm")
        with pytest.raises(ProofError, match="does not go through the attention interface"):
            FORMATS["vllm"].prove(open_source(folder), folder, given)


@pytest.mark.parametrize("case", ["gpt2", "gpt_neox", "mixtral", "granitemoe", "llava"])
def test_other_families(case, tmp_path):
    """No KV heads in the config, other names on disk, experts that are fused on the way, images."""
    model = tiny.model(case).double()
    folder = tiny.save(model, tmp_path / "m")
    assert headprune.export(folder, tmp_path / "out", to="vllm").record.proof.passed
    served = type(model).from_pretrained(tmp_path / "out")
    written, wanted = served.state_dict(), model.state_dict()
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[name], wanted[name].float()) for name in wanted)
    wanted[next(iter(wanted))].view(-1)[0] += 1
    assert not all(torch.equal(written[name], wanted[name].float()) for name in wanted)


@pytest.mark.parametrize(("shape", "dtype"), [("ragged", torch.float32), ("empty", torch.bfloat16)])
def test_experts_of_a_cut_model_are_copied(shape, dtype, tmp_path):
    model = tiny.model("mixtral", dtype)
    plan = ragged_plan(model) if shape == "ragged" else uneven_plan(model, 0, 2)
    cut_heads(model, resolve(plan, model, ragged=True))
    model.save_pretrained(tmp_path / "m")
    record = headprune.export(tmp_path / "m", tmp_path / "out", to="vllm").record
    assert record.proof.passed and record.changes
    given, served = (
        headprune.from_pretrained(tmp_path / name, dtype=torch.float32) for name in ("m", "out")
    )
    assert (served(IDS).logits - given(IDS).logits).abs().max() < 1e-5
    experts = given.get_submodule("model.layers.1.mlp.experts")
    with torch.no_grad():
        experts.down_proj.copy_(experts.down_proj.roll(1, 0))
    assert (served(IDS).logits - given(IDS).logits).abs().max() > 1e-3


def test_a_folder_without_one_of_its_tensors_is_refused(tmp_path):
    folder = tiny.save(tiny.model("mixtral"), tmp_path / "m")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "experts.0" in name)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(PlanError, match=f"its folder has no '{name}'"):
        headprune.export(folder, tmp_path / "out", to="vllm")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("gptj", "attention interface is called, and a gptj does not call it"),
        ("deepseek_v3", "made of one latent .MLA."),
        ("bert-mlm", "a BertForMaskedLM generates no text"),
    ],
)
def test_a_model_that_the_backend_cannot_run_is_refused(case, message, tmp_path):
    folder = tiny.save(tiny.model(case), tmp_path / "m")
    with pytest.raises(PlanError, match=message):
        headprune.export(folder, tmp_path / "out", to="vllm")
    assert not (tmp_path / "out").exists()


def test_wrong_counts_in_the_config_are_noticed(tmp_path):
    cut(tmp_path / "m", "llama-gqa")
    headprune.export(tmp_path / "m", tmp_path / "out", to="vllm")
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    config["per_layer_config"]["1"]["num_attention_heads"] += 2
    file.write_text(json.dumps(config))
    given = ExportConfig(to="vllm")
    with pytest.raises(ProofError, match="and the config says"):
        FORMATS["vllm"].prove(open_source(tmp_path / "m"), tmp_path / "out", given)
