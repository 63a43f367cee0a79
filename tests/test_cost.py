"""Costs against live caches and against parameters counted here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headprune.model.cost import model_cost
from headprune.model.inspection import inspect
from headprune.model.probes import probe_inputs
from headprune.surgery.cut import cut_heads, resolve
from tests import tiny
from tests.cutting import uneven_plan
from tests.marks import slow_unless
from tests.test_generation import GENERATING

CACHING = ["llama-mha", "llama-mqa", *GENERATING]


@pytest.mark.parametrize("empty", [None, 0, -1])
@pytest.mark.parametrize("case", slow_unless(tiny.one_per_row(CACHING).__contains__, CACHING))
def test_the_cache_is_as_large_as_a_live_one(case: str, empty: int | None) -> None:
    model = tiny.model(case)
    if empty is not None:
        cut_heads(model, resolve(uneven_plan(model, empty), model))
    shortened = {"input_ids", "attention_mask", "decoder_input_ids"}  # to less than a window
    inputs = {k: v[:, :6] if k in shortened else v for k, v in probe_inputs(model).items()}
    length = inputs.get("decoder_input_ids", inputs.get("input_ids")).shape[1]
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
    layers = getattr(cache, "self_attention_cache", cache).layers
    live = [layer.keys[:1].nbytes + layer.values[:1].nbytes for layer in layers]
    assert sum(live) == model_cost(model).kv_cache_bytes * length
    if empty is not None:  # a layer without heads keeps its length
        assert live[empty] == 2 * length * model.dtype.itemsize


@pytest.mark.parametrize("case", tiny.CASES)
def test_every_parameter_counts_once(case: str) -> None:
    model = tiny.model(case)
    cost = model_cost(model)
    tensors = {p.data_ptr(): p.numel() for p in model.parameters()}
    assert cost.parameters == sum(tensors.values())
    names = ("attn", "attention.self", "attention.output.dense")
    named = dict(model.named_parameters())
    wanted = sum(p.numel() for name, p in named.items() if any(part in name for part in names))
    assert cost.attention_parameters == wanted
    if case in ("gpt2", "bert-mlm"):  # tied embeddings
        untied = sum(p.numel() for _, p in model.named_parameters(remove_duplicate=False))
        assert cost.parameters < untied


def test_cost_counts_what_is_there() -> None:
    cost = model_cost(tiny.model("llama-gqa", torch.bfloat16))
    assert cost.query_heads == 6 * tiny.LAYERS
    assert cost.kv_cache_bytes == 2 * 3 * 10 * tiny.LAYERS * 2  # K and V, bfloat16
    per_layer = 48 * 60 + 60 + 2 * (48 * 30 + 30) + 60 * 48 + 48
    assert cost.attention_parameters == per_layer * tiny.LAYERS
    assert model_cost(tiny.model("bert-mlm")).kv_cache_bytes == 0


def test_inspect_says_what_the_cache_measures(tmp_path: Path) -> None:
    model = tiny.model("llama-gqa")
    report = inspect(tiny.save(model, tmp_path / "model"))
    with torch.no_grad():
        cache = model(torch.tensor([[5, 6, 7]]), use_cache=True).past_key_values
    live = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) // 3
    assert report.kv_cache_bytes["float32"] == live
    assert "head_dim 10 is under the usual 64 and 128" in report.notes[0]
    assert "quantise it in the engine first" in report.notes[1]
    encoder = inspect(tiny.save(tiny.model("bert-mlm"), tmp_path / "encoder"))
    assert not any("quantise" in note for note in encoder.notes)  # no cache
    assert report.attention_parameters == sum(a.parameters for a in report.attentions)
