"""export --to decilm: blocks that describe the tensors, and the same outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import headprune
from headprune.errors import PlanError, ProofError
from headprune.exporting.formats import FORMATS
from headprune.exporting.source import open_source
from headprune.io.tensors import read_tensors
from headprune.surgery.cut import cut_heads, resolve
from tests import tiny
from tests.cutting import ragged_plan, uneven_plan


def made(folder: Path, *empty: int, ragged: bool = False, case: str = "mistral") -> Path:
    model = tiny.model(case)
    model.config.sliding_window = None
    plan = ragged_plan(model) if ragged else uneven_plan(model, *empty)
    cut_heads(model, resolve(plan, model, ragged=True))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("shape", ["uneven", "ragged", "empty", "first layer empty"])
def test_blocks_hold_what_is_there(shape: str, tmp_path: Path) -> None:
    empty = {"empty": (2,), "first layer empty": (0,)}.get(shape, ())
    folder, out = made(tmp_path / "m", *empty, ragged=shape == "ragged"), tmp_path / "out"
    record = headprune.export(folder, out, to="decilm").record
    assert record.proof.passed and "only the KV cache shrinks" in record.changes[0]
    config = json.loads((out / "config.json").read_text())
    tensors = read_tensors(out / "model.safetensors")
    queries, width = config["num_attention_heads"], config["head_dim"]
    for layer, block in enumerate(config["block_configs"]):
        at = f"model.layers.{layer}.self_attn"
        assert block["attention"]["no_op"] == (layer == 2 and shape == "empty")
        if block["attention"]["no_op"]:
            assert not any(name.startswith(at) for name in tensors)
            continue
        kv_heads = queries // block["attention"]["n_heads_in_group"]
        assert tensors[f"{at}.q_proj.weight"].shape[0] == queries * width
        assert tensors[f"{at}.v_proj.weight"].shape[0] == kv_heads * width
    before = sum(a.kv_heads for a in open_source(folder).attentions)
    now = sum(
        queries // b["attention"]["n_heads_in_group"]
        for b in config["block_configs"]
        if not b["attention"]["no_op"]
    )
    assert now == before + (shape == "first layer empty")
    # a block that says other counts
    group = config["block_configs"][1]["attention"]
    group["n_heads_in_group"] = queries // (queries // group["n_heads_in_group"] + 1) or 1
    (out / "config.json").write_text(json.dumps(config))
    given = headprune.export.options(model="x", output=out, to="decilm")
    with pytest.raises(ProofError, match="Block 1 describes"):
        FORMATS["decilm"].prove(open_source(folder), out, given)


def test_a_changed_weight_is_noticed(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder, out = made(tmp_path / "m", 2), tmp_path / "out"
    headprune.export(folder, out, to="decilm")
    tensors = read_tensors(out / "model.safetensors")
    torch.nn.init.normal_(tensors["model.layers.1.self_attn.q_proj.weight"])
    save_file(tensors, out / "model.safetensors")
    given = headprune.export.options(model="x", output=out, to="decilm")
    assert not FORMATS["decilm"].prove(open_source(folder), out, given).passed


@pytest.mark.parametrize(
    ("case", "message"), [("qwen2", "DeciLM is a Llama"), ("llama-gqa", "DeciLM has no biases")]
)
def test_what_is_no_decilm_is_refused(case: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=message):
        headprune.export(made(tmp_path / "m", 1, case=case), tmp_path / "out", to="decilm")
    assert not (tmp_path / "out").exists()
