"""Costs against live caches and against parameters counted here."""

import json

import pytest
import torch
from transformers import DynamicCache

import headprune
from headprune.model.attention import attention_of
from headprune.model.cost import KVCache, longest_context, model_cost, stated_context
from headprune.model.inspection import inspect
from headprune.model.probes import probe_inputs
from headprune.planning.budgets import cache_prices
from headprune.surgery.cut import cut_heads, resolve
from tests import tiny
from tests.cutting import uneven_plan
from tests.marks import slow_unless
from tests.test_cli import succeeds
from tests.test_generation import GENERATING, WINDOWED
from tests.test_recognition import PRESENT, build
from tests.test_windows import plan_of

WINDOW = tiny.SIZES["sliding_window"]
LENGTHS = (WINDOW - 2, WINDOW, 20)
CACHING = list(dict.fromkeys(["llama-mha", "llama-mqa", *GENERATING, *WINDOWED]))
FAST = tiny.one_per_row(CACHING) & {*GENERATING}
FAST |= {"mistral", "qwen2-full_first", "gemma3_text-sliding_first", "gpt_oss-sliding_first"}


def live_bytes(model, length):
    """The bytes of a sequence in every layer of a real cache, its last token decoded."""
    ids = torch.randint(5, tiny.VOCAB, (1, length), generator=torch.Generator().manual_seed(0))
    inputs, own = {}, "input_ids"
    if model.config.is_encoder_decoder:
        own = "decoder_input_ids"
        inputs = {n: v[:1] for n, v in probe_inputs(model).items() if not n.startswith("decoder")}
    with torch.no_grad():
        cache = model(**inputs, **{own: ids[:, :-1]}, use_cache=True).past_key_values
        model(**inputs, **{own: ids[:, -1:]}, past_key_values=cache, use_cache=True)
    layers = getattr(cache, "self_attention_cache", cache).layers
    held = [[v for v in vars(layer).values() if isinstance(v, torch.Tensor)] for layer in layers]
    return [sum(each.nbytes for each in one if each.dim() > 2) for one in held]


@pytest.mark.parametrize("empty", [None, 0, -1])
@pytest.mark.parametrize("case", slow_unless(FAST.__contains__, CACHING))
def test_the_cache_is_as_large_as_a_live_one(case, empty):
    model = tiny.model(case)
    if empty is not None:
        cut_heads(model, resolve(uneven_plan(model, empty), model))
    per_token = KVCache.of(model).elements(1) * model.dtype.itemsize
    windows = any(getattr(one, "is_sliding", 0) for one in DynamicCache(config=model.config).layers)
    for length in LENGTHS:
        live = live_bytes(model, length)
        assert sum(live) == model_cost(model, length).kv_cache_bytes
        # a count per token is right up to the window, and beyond it without windows alone
        assert (sum(live) == per_token * length) == (length < WINDOW or not windows)
        if empty is not None:  # a layer without heads keeps its length
            kept = {length, min(length, WINDOW - 1)}
            assert live[empty] in {2 * n * model.dtype.itemsize for n in kept}


# hybrids, chunked attention, K and V of other layers, narrower V, latents, keys of an indexer
STRUCTURES = ["nemotron_h", "falcon_h1", "llama4_text", "gemma3n_text", "mimo_v2_flash"]
STRUCTURES += ["qwen3_next", "cwm", "gemma4_text", "deepseek_v2", "axk2"]


@pytest.mark.parametrize("name", [name for name in STRUCTURES if name in PRESENT])
def test_so_is_that_of_models_without_a_row(name, monkeypatch):
    model = build(name, monkeypatch)
    if name == "llama4_text":
        model = tiny.model(name, attention_chunk_size=WINDOW)
    for length in LENGTHS:
        assert sum(live_bytes(model, length)) == model_cost(model, length).kv_cache_bytes > 0
    windows = name in ("llama4_text", "gemma3n_text", "mimo_v2_flash", "cwm", "gemma4_text")
    assert model_cost(model).kv_cache_tokens == (tiny.SIZES["n_positions"] if windows else 1)


OFTEN = ["mistral", "qwen2-full_first", "gemma3_text-sliding_first", "gpt_oss-sliding_first"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", OFTEN)
def test_prices_and_longest_contexts_are_those_of_a_live_cache(case, dtype):
    model = tiny.model(case, dtype)
    context, attentions = stated_context(model), attention_of(model)
    assert context == model.config.max_position_embeddings
    prices = cache_prices(model, attentions, dtype, context)
    weights = sum(p.nbytes for p in model.parameters())
    for length in LENGTHS:
        room = weights + sum(live_bytes(model, length))
        grows = length < WINDOW or case != "mistral"
        assert longest_context(model, room) == (length if grows else context)
        assert longest_context(model, room - 1) == (length if grows else WINDOW - 1) - 1
    cut_heads(model, resolve(uneven_plan(model, 1), model))
    left = [(a.query_heads, a.kv_heads) for a in attention_of(model)]
    live = sum(live_bytes(model, context))
    assert prices.total(left) == live
    assert cache_prices(model, attention_of(model), dtype, 1).total(left) * context != live


@pytest.mark.parametrize("case", ["llama-gqa", "mistral", "gemma3_text-sliding_first", "gpt_oss"])
def test_a_context_is_said_wherever_there_are_windows(case, tmp_path, capsys):
    model = tiny.model(case)
    folder = tiny.save(model, tmp_path / "m")
    (tmp_path / "t.txt").write_text(tiny.text(600))
    context = 1 if case == "llama-gqa" else model.config.max_position_embeddings
    said = "per token" if context == 1 else f"at {context} tokens"
    live = sum(live_bytes(model, context)) if context > 1 else sum(live_bytes(model, 2)) // 2
    options = ("--config", "seq_len=16", "--config", "speed=false", "--json")
    out = succeeds(capsys, "evaluate", folder, "--data", tmp_path / "t.txt", *options)
    cost = json.loads(out)["model"]["cost"]
    assert (cost["kv_cache_bytes"], cost["kv_cache_tokens"]) == (live, context)
    with pytest.raises(headprune.errors.PlanError, match=rf"has {live:,} bytes {said} in float32"):
        headprune.compress(folder, max_kv_bytes=live, dry_run=True)


@pytest.mark.parametrize("case", ["llama-gqa", "mistral", "gemma3_text-sliding_first"])
def test_caches_are_stated_at_contexts_that_the_model_takes(case):
    assert model_cost(tiny.model(case)).kv_cache_bytes_at == {}  # of 128 positions
    model = tiny.model(case, torch.bfloat16, max_position_embeddings=8_192)
    cost = model_cost(model)
    assert [*cost.kv_cache_bytes_at] == [2_048, 8_192]
    assert cost.kv_cache_bytes_at[2_048] == sum(live_bytes(model, 2_048))
    grows = cost.kv_cache_bytes_at[8_192] / cost.kv_cache_bytes_at[2_048]
    assert (grows == 4) == (case == "llama-gqa") and (grows == 1) == (case == "mistral")


@pytest.mark.parametrize("case", tiny.CASES)
def test_every_parameter_counts_once(case):
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


def test_cost_counts_what_is_there():
    cost = model_cost(tiny.model("llama-gqa", torch.bfloat16))
    assert cost.query_heads == 6 * tiny.LAYERS
    assert cost.kv_cache_bytes == 2 * 3 * 10 * tiny.LAYERS * 2  # K and V, bfloat16
    per_layer = 48 * 60 + 60 + 2 * (48 * 30 + 30) + 60 * 48 + 48
    assert cost.attention_parameters == per_layer * tiny.LAYERS
    assert model_cost(tiny.model("bert-mlm")).kv_cache_bytes == 0


def test_inspect_says_what_the_cache_measures(tmp_path):
    model = tiny.model("llama-gqa")
    report = inspect(tiny.save(model, tmp_path / "model"))
    with torch.no_grad():
        cache = model(torch.tensor([[5, 6, 7]]), use_cache=True).past_key_values
    live = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) // 3
    positions = model.config.max_position_embeddings
    assert report.caches[0].bytes == {positions: positions * live}
    assert "head_dim 10 is under the usual 64 and 128" in report.notes[0]
    assert "quantise it in the engine first" in report.notes[1]
    encoder = inspect(tiny.save(tiny.model("bert-mlm"), tmp_path / "encoder"))
    assert not any("quantise" in note for note in encoder.notes)  # no cache
    assert report.attention_parameters == sum(a.parameters for a in report.attentions)


@pytest.mark.parametrize("case", ["llama-gqa", "gemma3_text-sliding_first", "mistral", "gptj"])
def test_offers_are_what_a_cut_leaves(case, tmp_path, monkeypatch, capsys):
    """Of heads with a window, the cache of a model that has them."""
    monkeypatch.setattr("headprune.model.cost.CONTEXTS", (32, 64, 1_000))
    model = tiny.model(case)
    report = inspect(tiny.save(model, tmp_path / "model"))
    assert [*report.caches[0].bytes] == [32, 64]  # it has no more positions
    whole, rest = report.caches[0].bytes, report.caches[1:]
    assert whole == {n: 4 * KVCache.of(model).elements(n) for n in (32, 64)}
    fewer = [{n: round(share * size) for n, size in whole.items()} for share in (0.5, 0.25)]
    assert [one.bytes for one in rest[:2]] == fewer
    if case in ("mistral", "gptj"):  # windows in all layers; no interface of attention
        assert len(rest) == 2 and report.offered_window is None
        return
    window, paths = report.offered_window, [a.path for a in attention_of(model)]
    every = plan_of(model, [(0, 1, 2)] * len(paths), window.size, window.sinks)
    cut_heads(model, resolve(every, model))
    near = KVCache.of(model)
    assert [one.windowed for one in rest[2:]] == [0.5, 0.75]
    for one in rest[2:]:
        for n, size in one.bytes.items():
            saved = whole[n] - 4 * near.elements(n)
            assert size == whole[n] - one.windowed * saved
            assert (size < whole[n]) is (n > window.size + window.sinks)
    shown = succeeds(capsys, "inspect", tmp_path / "model")
    assert f"{rest[-1].bytes[64]:,}" in shown and f"the latest {window.size} tokens" in shown
