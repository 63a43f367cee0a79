"""headprune pad: heads for any number of GPUs."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import headprune
from headprune.config import ExportConfig
from headprune.errors import HeadpruneError
from headprune.formats.pad import FORMAT
from headprune.formats.source import open_source
from headprune.model.cost import model_cost
from headprune.tensors.zero_heads import divisible
from tests import tiny
from tests.test_regularise import IDS, shaped


@pytest.mark.parametrize(
    ("group_sizes", "by", "counts"),
    [
        ([7, 7], 4, (16, 4)),  # copies of both KV heads
        ([3, 3, 3], 2, (12, 4)),  # a zero KV head
        ([3, 3, 3], 8, (16, 8)),  # copies and zero heads
        ([1, 3], 2, (6, 2)),  # ragged groups become equal
        ([1] * 12, 8, (16, 16)),
        ([], 4, (4, 4)),
    ],
)
def test_the_fewest_heads_that_divide(group_sizes, by, counts):
    queries, kv_heads = divisible(group_sizes, by)
    assert (len(queries), len(kv_heads)) == counts
    assert [slot for slot in queries if slot is not None] == [*range(sum(group_sizes))]
    size, starts = len(queries) // len(kv_heads), [0]
    for each in group_sizes:
        starts.append(starts[-1] + each)
    for place, query in enumerate(queries):  # every query keeps its KV head
        if query is not None:
            kv = kv_heads[place // size]
            assert kv is not None and starts[kv] <= query < starts[kv + 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_are_those_of_the_file(dtype, tmp_path):
    net = tiny.model("llama-gqa").to(dtype)
    tiny.save(net, tmp_path / "m")
    (said,) = headprune.pad(tmp_path / "m", tmp_path / "out", multiple_of=4).record.changes[-1:]
    padded = headprune.from_pretrained(tmp_path / "out")
    before, after = (model_cost(each).kv_cache_bytes for each in (net, padded))
    assert f"KV cache: {before:,} bytes per token become {after:,}." in said


@pytest.mark.parametrize("shape", ["ragged", "empty", "uneven", "whole"])
@pytest.mark.parametrize(("case", "by"), [("llama-gqa", 2), ("qwen2", 8)])
def test_the_padded_model_computes_the_same(case, by, shape, tmp_path):
    folder, out = tmp_path / "m", tmp_path / "out"
    model = shaped(folder, case, shape)
    record = headprune.pad(folder, out, multiple_of=by).record
    assert record.proof.passed and "KV cache" in record.changes[-1]
    served = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert (served(IDS).logits - model(IDS).logits).abs().max() < 1e-12
    written = open_source(out)
    assert all(a.query_heads % by == a.kv_heads % by == 0 for a in written.attentions)
    assert (out / "modeling_headprune.py").is_file() == (shape != "whole")
    weights = load_file(out / "model.safetensors")
    for name in weights:
        if name.endswith("o_proj.weight"):
            weights[name][:, : weights[name].shape[1] // 2] *= 1.1
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    given = ExportConfig(to="padded", multiple_of=by)
    assert not FORMAT.prove(open_source(folder), out, given).passed


def test_prune_removes_what_pad_added(tmp_path):
    model = tiny.model("llama-gqa").to(torch.bfloat16)
    folder, out = tiny.save(model, tmp_path / "m"), tmp_path / "out"
    assert headprune.pad(folder, out, multiple_of=2).record.changes[0].endswith("(zero heads).")
    plan = out / "unpad.json"
    headprune.prune(out, tmp_path / "back", plan=plan)
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (
        json.loads((folder / "config.json").read_text())["num_attention_heads"]
        == (json.loads((tmp_path / "back" / "config.json").read_text())["num_attention_heads"])
    )
    other = {path: [0, 1] for path in json.loads(plan.read_text())}
    plan.write_text(json.dumps(other))
    headprune.prune(out, tmp_path / "other", plan=plan)
    wrong = load_file(tmp_path / "other" / "model.safetensors")
    assert not all(torch.equal(before[name], wrong[name]) for name in before)


@pytest.mark.parametrize(
    ("case", "by", "why"),
    [
        ("llama-gqa", 3, "divide by 3 already"),
        ("llama-gqa", 5, "takes no 10 query heads with hidden_size 48"),
        ("opt", 3, "holds no other counts of heads"),
        ("gpt2", 3, "zero heads need separate projections"),
        ("llama-gqa", 1, "multiple-of"),
    ],
)
def test_what_cannot_be_padded(case, by, why, tmp_path):
    folder = tiny.save(tiny.model(case), tmp_path / "m")
    with pytest.raises(HeadpruneError, match=why):
        headprune.pad(folder, tmp_path / "out", multiple_of=by)
    assert not (tmp_path / "out").exists()


def test_models_without_a_count_of_kv_heads(tmp_path):
    folder = tiny.save(tiny.model("vit"), tmp_path / "m")
    headprune.pad(folder, tmp_path / "out", multiple_of=4)
    assert headprune.from_pretrained(tmp_path / "out").config.num_attention_heads == 8
