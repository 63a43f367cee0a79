"""Generation of cut models through every kind of cache, as their gated originals generate.

The gates are hooks on the uncut model: nothing of the runtime is in what the cut model is held to.
"""

import copy
import dataclasses
import functools
import inspect
import json
from itertools import product

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StaticCache

import headprune
from headprune.errors import ProofError
from headprune.model import probes
from headprune.model.attention import attention_of
from headprune.model.gating import fixed, gated
from headprune.model.loading import task_of
from headprune.model.skeleton import Unmapped
from headprune.runtime import modeling_headprune
from headprune.schemas.plan import AttentionPlan, Plan
from headprune.surgery.cut import cut_heads, resolve
from headprune.tensors.units import Unit
from tests import tiny
from tests.cutting import prove, uneven_plan
from tests.marks import slow_unless

NEW = 5  # tokens, after prompts that are longer than the window of 8
TOLERANCE = 1e-5  # of the largest logit; without its stub a layer moves them by 1e-2 and more
GENERATING = [case for case in tiny.FAMILY_CASES if tiny.task(case) in ("causal-lm", "seq2seq-lm")]


def _windows(case):
    """The variants of a family by the kinds of layers in its cache; none if it has but one."""
    text = tiny.config(case).get_text_config(decoder=True)
    names = {field.name for field in dataclasses.fields(text)}
    if "layer_types" in names:
        return [f"{case}-sliding_first", f"{case}-full_first"]
    if "use_sliding_window" in names:
        return [f"{case}-sliding"]
    return [case] if "sliding_window" in names else []


WINDOWED = [variant for case in GENERATING for variant in _windows(case)]


def _left_padded():
    """Two texts of more than two of the tiny windows."""
    ids = torch.randint(5, tiny.VOCAB, (2, 22), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


# in it prompt lookup finds something to continue with
REPEATING = {"input_ids": torch.tensor([[7, 8, 9, 10, 11, 12, 7, 8, 9, 10, 13, 14, 7, 8, 9]])}


def chunks(model):
    """Logits of a padded batch: a first piece, several tokens at once, then one by one."""
    ids, mask = _left_padded().values()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    logits, cache, start = [], None, 0
    for piece in ids.split([12, 5, 2, 1, 1, 1], dim=1):
        end = start + piece.shape[1]
        own = {"position_ids": positions[:, start:end]} if takes_positions else {}
        with torch.no_grad():
            result = model(
                piece, attention_mask=mask[:, :end], past_key_values=cache, use_cache=True, **own
            )
        logits.append(result.logits)
        cache, start = result.past_key_values, end
    return ids, torch.cat(logits, dim=1)[mask.bool()]


def _generate(model, one_text=False, **options):
    """Tokens, and the logits they were chosen by; of beams, whose losers may tie, the scores."""
    inputs = REPEATING if one_text else _left_padded()
    if task_of(model) == "seq2seq-lm":
        inputs = probes.probe_inputs(model)
        del inputs["decoder_input_ids"]
        inputs = {name: value[:1] if one_text else value for name, value in inputs.items()}
        options["decoder_start_token_id"] = 2
        options["no_repeat_ngram_size"] = 1  # positions show only between tokens that differ
    out = model.generate(
        **inputs,
        **options,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        use_cache=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    scores = getattr(out, "sequences_scores", None)
    return out.sequences, torch.stack(out.logits) if scores is None else scores


def assisted(model):
    """With a small model of another kind where that will do; it is right now and then."""
    own = task_of(model) == "seq2seq-lm" or model.config.model_type in tiny.VISION_LANGUAGE
    helper = assistant(model.config.model_type if own else "llama-mha")
    return _generate(model, one_text=True, assistant_model=helper)


def _option(one_text=False, **options):
    return lambda model: _generate(model, one_text, **options)


STATIC = {"cache_implementation": "static", "disable_compile": True}
MODES = {
    "greedy": _option(),
    "beams": _option(num_beams=3, output_scores=True),
    "prompt_lookup": _option(one_text=True, prompt_lookup_num_tokens=4),
    "assisted": assisted,
    "static": _option(**STATIC),
    "prefill_chunks": _option(prefill_chunk_size=5),
    "static_prefill_chunks": _option(**STATIC, prefill_chunk_size=5),
}


@functools.cache
def original(case):
    """An uncut model; generating with it changes nothing in it."""
    return tiny.model(case)


@functools.cache
def assistant(case):
    """Without gates, also where it is the original's equal."""
    return tiny.model(case)


@functools.lru_cache(maxsize=1)
def pair(case, empty):
    """A cut of the original, some of whose layers have no heads, and the model it leads to."""
    base = original(case)
    plan, cut = uneven_plan(base, *empty), copy.deepcopy(base)
    cut_heads(cut, resolve(plan, cut))
    return resolve(plan, base), cut


def compare(mode, case, empty):
    """Asserts that the cut model computes what its gated original does, if that can do it."""
    cuts, cut = pair(case, empty)
    with gated([c.attention for c in cuts], fixed([c.gate() for c in cuts])):
        try:
            tokens, logits = mode(original(case))
        except (TypeError, ValueError, RuntimeError) as error:
            pytest.skip(f"the uncut model: {str(error).splitlines()[-1]}")
    got_tokens, got = mode(cut)
    assert got_tokens.tolist() == tokens.tolist()
    assert (got - logits).abs().max() <= TOLERANCE * max(1.0, float(logits.abs().max()))


def firsts(case):
    """The first layer of each type."""
    sliding = DynamicCache(config=original(case).config.get_text_config(decoder=True)).is_sliding
    return tuple(sorted({sliding.index(kind) for kind in sliding}))


def emptied(case):
    """Each layer alone, the first of each type together, all but the last."""
    layers = range(tiny.LAYERS)
    return sorted({*((layer,) for layer in layers), firsts(case), (*layers[:-1],)})


def some_modes(cases, modes):
    """Every mode with a case of each layout; with others the cache that no proof is made with."""
    some = tiny.one_per_layout(cases)
    return slow_unless(lambda case, mode: case in some or mode == "static", product(cases, modes))


# the text part of a model of images and text is one of these
TEXT = [case for case in WINDOWED if tiny.family_of_case(case) not in tiny.VISION_LANGUAGE]


@pytest.mark.parametrize("case", slow_unless(tiny.one_per_row(TEXT).__contains__, TEXT))
def test_padded_batches_and_crops_with_any_layers_empty(case):
    for empty in emptied(case):
        compare(chunks, case, empty)
        if len(empty) == 1:
            compare(MODES["prompt_lookup"], case, empty)


@pytest.mark.parametrize(("case", "mode"), some_modes(WINDOWED, [*MODES]))
def test_generation_with_the_first_layer_of_each_type_empty(case, mode):
    compare(MODES[mode], case, firsts(case))


PLAIN = [case for case in GENERATING if not _windows(case)]
# where no layer has a window, crops and chunks are those of prompt lookup
PLAIN_MODES = [mode for mode in MODES if mode not in ("assisted", "prefill_chunks")]


@pytest.mark.parametrize(("case", "mode"), some_modes(PLAIN, PLAIN_MODES))
def test_generation_with_the_first_and_last_layer_empty(case, mode):
    compare(MODES[mode], case, (0, -1))


@pytest.mark.parametrize("mode", [chunks, *MODES.values()], ids=["chunks", *MODES])
def test_without_a_stub_no_mode_is_that_of_the_gated_original(mode, monkeypatch):
    monkeypatch.setattr(modeling_headprune, "_keep_length", stub_in_layer_0)
    with pytest.raises((AssertionError, AttributeError, RuntimeError)):
        compare(mode, "smollm3-full_first", (1,))


def stub_in_layer_0(cache, layer, states):
    """What keeps the length for generate(), but no masks and no crops."""
    if layer == 0:
        cache.update(states[:, None, :, :1], states[:, None, :, :1], layer)
    return states.shape[1]


@pytest.mark.parametrize("case", ["gemma2-full_first", "gemma2-sliding_first"])
def test_the_proof_decodes_in_chunks_and_so_sees_a_missing_stub(case, tmp_path, monkeypatch):
    def proven():
        model = copy.deepcopy(original(case))
        return prove(model, resolve(uneven_plan(model, 1), model), tmp_path).passed

    assert proven()
    monkeypatch.setattr(modeling_headprune, "_keep_length", stub_in_layer_0)
    with pytest.raises((ProofError, RuntimeError)):
        proven()
    monkeypatch.setattr(probes, "_decoded_in_chunks", lambda model, inputs: torch.ones(1))
    assert proven()  # one text decoded one by one does not show it


@pytest.mark.parametrize("case", ["llama-gqa", "gemma2-full_first"])
def test_a_static_cache_of_given_sizes_takes_the_stub(case):
    model, ids = copy.deepcopy(original(case)), REPEATING["input_ids"]
    parts = {
        a.path: AttentionPlan(query_heads=6, kv_heads=3, keep=() if layer < 2 else (*range(6),))
        for layer, a in enumerate(attention_of(model))
    }
    cut_heads(model, resolve(Plan(unit=Unit.HEAD, attentions=parts), model))
    cache = StaticCache(config=model.config, max_cache_len=20)
    cache.early_initialization(1, 3, 10, model.dtype, model.device)
    with torch.no_grad():
        wanted = model(ids).logits
        start = model(ids[:, :9], past_key_values=cache).logits
        end = model(ids[:, 9:], past_key_values=cache).logits
    torch.testing.assert_close(torch.cat([start, end], dim=1), wanted)
    assert cache.layers[1].keys.shape[1:] == (3, min(20, cache.layers[1].max_cache_len), 10)


def test_a_cache_with_stubs_takes_all_operations_on_batches():
    _, cut = pair("gemma2-full_first", (0, 1))
    ids, mask = _left_padded().values()
    rows = torch.tensor([1, 0, 1])
    with torch.no_grad():
        wanted = cut(ids[rows], attention_mask=mask[rows]).logits[:, -3:]
        cache = cut(ids[:, :-3], attention_mask=mask[:, :-3], use_cache=True).past_key_values
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([2, 3, 0, 1]))
        cache.batch_select_indices(torch.tensor([0, 2, 1]))
        got = cut(ids[rows, -3:], attention_mask=mask[rows], past_key_values=cache).logits
    torch.testing.assert_close(got, wanted)


def _without(model, layer, *heads):
    """A cut of some heads of the cross attention of a layer."""
    parts = {}
    cross = [a.path for a in attention_of(model) if a.kind == "cross"]
    for a in attention_of(model):
        gone = heads if a.path == cross[layer] else ()
        keep = tuple(h for h in range(a.query_heads) if h not in gone)
        parts[a.path] = AttentionPlan(query_heads=a.query_heads, kv_heads=a.kv_heads, keep=keep)
    return resolve(Plan(unit=Unit.HEAD, attentions=parts), model)


def _aligning(model, heads):
    inputs = probes.probe_inputs(model)
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).cross_attentions
    return [weights[layer][:, head] for layer, head in heads]


@pytest.mark.parametrize("gone", [(0,), tuple(range(6))])
def test_heads_that_give_the_times_of_words_are_counted_anew(gone, tmp_path):
    model = tiny.model("whisper", attn="eager")
    named = [[1, 2], [2, 0], [2, 5]]
    model.generation_config = GenerationConfig(alignment_heads=named)
    cuts = _without(model, 2, *gone)
    with gated([cut.attention for cut in cuts], fixed([cut.gate() for cut in cuts])):
        wanted = _aligning(model, named)
    cut_heads(model, cuts)
    model.save_pretrained(tmp_path)
    reloaded = headprune.from_pretrained(tmp_path, attn_implementation="eager")
    left = reloaded.generation_config.alignment_heads
    assert left == ([[1, 2], [2, 4]] if gone == (0,) else [[1, 2]])
    kept = [w for w, (layer, head) in zip(wanted, named, strict=True) if [layer, head] != [2, 0]]
    for got, old in zip(_aligning(reloaded, left), kept, strict=False):
        torch.testing.assert_close(got, old, atol=1e-5, rtol=0)
    if gone == (0,):  # numbered as before, they would be others
        (other,) = _aligning(reloaded, [[2, 3]])
        assert (other - wanted[2]).abs().max() > 1e-3


@pytest.mark.parametrize("in_memory", [False, True])
def test_the_file_of_a_result_names_the_heads_that_are_left(in_memory, tmp_path, monkeypatch):
    if in_memory:  # cut in memory instead of on disk
        monkeypatch.setattr("headprune.result.write.cut_pieces", _unmapped)
    model, folder = tiny.model("whisper"), tmp_path / "model"
    model.save_pretrained(folder)
    settings = {"alignment_heads": [[1, 2], [2, 0], [2, 5]], "is_multilingual": False}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    path = [a.path for a in attention_of(model) if a.kind == "cross"][2]
    (tmp_path / "plan.json").write_text(json.dumps({path: [0]}))
    headprune.prune(folder, tmp_path / "cut", plan=tmp_path / "plan.json")
    written = json.loads((tmp_path / "cut" / "generation_config.json").read_text())
    assert written == {"alignment_heads": [[1, 2], [2, 4]], "is_multilingual": False}
    (tmp_path / "plan.json").write_text(json.dumps({path: [5]}))  # by its original number
    headprune.prune(tmp_path / "cut", tmp_path / "again", plan=tmp_path / "plan.json")
    written = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert written["alignment_heads"] == [[1, 2]]


def _unmapped(*_):
    raise Unmapped("a tensor")
