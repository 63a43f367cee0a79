"""KV heads with a window: what is written computes as the original with a mask per head."""

import copy
import json
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from transformers import DynamicCache, StaticCache, Trainer, TrainingArguments

from headprune.errors import PlanError, ProofError
from headprune.model import probes
from headprune.model.attention import attention_of, identity
from headprune.model.cost import KVCache, model_cost
from headprune.model.windows import Narrowed, windowed
from headprune.proof import equivalence
from headprune.runtime import modeling_headprune
from headprune.schemas.plan import AttentionPlan, Plan
from headprune.schemas.records import Window
from headprune.surgery.cut import cut_heads, narrowed, resolve
from headprune.surgery.edit import Edit, trying
from headprune.tensors.units import Unit
from tests import tiny
from tests.cutting import prove

SIZE, SINKS = 8, 3
FORMS = (0, 1, 2), (0, 2), (), (1,)  # KV heads with a window, by layer: the first has no full head
CAUSAL = [case for case in tiny.FAMILY_CASES if tiny.task(case) == "causal-lm"]
CANNOT = {
    **dict.fromkeys(("gpt_neo", "gptj", "xglm"), "attention interface"),
    **dict.fromkeys(("bloom", "mpt", "falcon", "falcon-mqa"), "bias for every head"),
    **dict.fromkeys(("falcon-new", "falcon-alibi"), "bias for every head"),
    "deepseek_v3": "one latent for all heads",
}


def plan_of(model, forms=FORMS, size=SIZE, sinks=SINKS, keep=None):
    """The heads of FORMS see a window, in modules that cache the whole past."""
    cache, parts = KVCache.of(model), {}
    for a, heads in zip(attention_of(model), forms * 9, strict=False):
        can = a.path in cache.per_token and a.path not in cache.windows
        parts[a.path] = AttentionPlan(
            query_heads=a.query_heads,
            kv_heads=a.kv_heads,
            keep=tuple(range(a.query_heads)) if keep is None else keep[a.path],
            window=tuple(head for head in heads if head < a.kv_heads) if can else (),
        )
    window = Window(size=size, sinks=sinks)
    return Plan(unit=Unit.KV_GROUP, model=identity(model, "tiny"), window=window, attentions=parts)


@pytest.fixture(scope="module")
def pair():
    """A model, its plan, and a copy whose cache forgets."""
    stock = tiny.model("llama-gqa")
    plan, ours = plan_of(stock), copy.deepcopy(stock)
    cut_heads(ours, resolve(plan, ours))
    return stock, plan, ours


@pytest.fixture(scope="module")
def texts():
    """Three texts, two padded on the left, and their masks."""
    ids = torch.randint(5, tiny.VOCAB, (3, 37), generator=torch.Generator().manual_seed(0))
    return ids, torch.ones(3, 37).long().masked_fill(
        torch.arange(37) < torch.tensor([[0], [9], [30]]), 0
    )


def apart(one, other):
    one, other = one.detach(), other.detach()
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("case", CAUSAL)
def test_every_causal_family(case, tmp_path):
    """A family has proven windows, or a reason why not."""
    model = tiny.model(case)
    if not any(part.window for part in plan_of(model).attentions.values()):
        assert KVCache.of(model).windows  # each layer has a window of its own
        return
    if case in CANNOT:
        with pytest.raises(PlanError, match=CANNOT[case]):
            equivalence.expect(model, resolve(plan_of(model), model))
        return
    prove(model, resolve(plan_of(model), model), tmp_path / "cut")


def fed(model, ids, mask, sizes):
    """Logits of texts that are fed in pieces, through one cache."""
    cache, logits, end = DynamicCache(config=model.config), [], 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    for size in sizes:
        some, end = slice(end, end + size), end + size
        own = {"attention_mask": mask[:, :end], "position_ids": places[:, some]}
        result = model(ids[:, some], past_key_values=cache, use_cache=True, **own)
        logits.append(result.logits)
    return torch.cat(logits, 1), cache


@pytest.mark.parametrize(("implementation", "piece"), [("sdpa", 1_024), ("sdpa", 5), ("eager", 5)])
@pytest.mark.parametrize("sizes", [[37], [12] + [1] * 25, [5] * 7 + [2], [1] * 37, [20, 3, 14]])
@torch.no_grad()
def test_pieces_through_the_cache(pair, texts, sizes, implementation, piece, monkeypatch):
    monkeypatch.setattr(modeling_headprune, "PIECE", piece)
    (stock, plan, ours), (ids, mask) = pair, texts
    for model in (stock, ours):
        model.set_attn_implementation(implementation)
    own = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with trying(stock, Edit(plan)):
        wanted = stock(ids, use_cache=False, **own).logits[mask.bool()]
    got = fed(ours, ids, mask, sizes)[0][mask.bool()]
    assert apart(got, wanted) < 1e-5
    others = {"size": (SIZE - 1, SINKS), "sinks": (SIZE, SINKS - 1), "none": (SIZE, 0)}
    for size, sinks in others.values():
        with trying(stock, Edit(plan_of(stock, size=size, sinks=sinks))):
            other = stock(ids, use_cache=False, **own).logits[mask.bool()]
        assert apart(got, other) > 0.01
    for model in (stock, ours):
        model.set_attn_implementation("sdpa")


GENERATED = {
    "greedy": ({}, {}),
    "sampling": ({"do_sample": True, "top_k": 0}, {}),
    "beams": ({"num_beams": 4, "num_return_sequences": 2}, {}),
    "chunked prefill": ({}, {"prefill_chunk_size": 10}),
    "no cache": ({}, {"use_cache": False}),
    "own cache": ({}, {"past_key_values": DynamicCache}),
}


@pytest.mark.parametrize("how", GENERATED)
def test_generation(pair, texts, how):
    """The tokens of a mask per head; the full model writes others."""
    (stock, plan, ours), (ids, mask) = pair, texts
    both, own = GENERATED[how]
    own = {name: value() if callable(value) else value for name, value in own.items()}

    def written(model, **more):
        torch.manual_seed(1)
        return model.generate(ids, attention_mask=mask, max_new_tokens=30, **both, **more)

    with trying(stock, Edit(plan)):
        wanted = written(stock, use_cache=False)
    assert written(ours, **own).equal(wanted)
    assert not written(stock).equal(wanted)


def test_generation_from_embeddings(pair, texts):
    (_, _, ours), (ids, mask) = pair, texts
    embedded = {"inputs_embeds": ours.get_input_embeddings()(ids), "attention_mask": mask}
    wanted = ours.generate(ids, attention_mask=mask, max_new_tokens=9)[:, ids.shape[1] :]
    assert ours.generate(**embedded, max_new_tokens=9).equal(wanted)


def test_drafts(pair, texts):
    """Assisted decoding takes drafted tokens back."""
    (stock, _, ours), (ids, _) = pair, texts
    wanted, near = ours.generate(ids[:1], max_new_tokens=40), copy.deepcopy(stock)
    with torch.no_grad():
        for tensor in near.parameters():
            tensor.add_(0.01 * torch.randn_like(tensor))
    assert ours.generate(ids[:1], max_new_tokens=40, prompt_lookup_num_tokens=5).equal(wanted)
    assert ours.generate(ids[:1], max_new_tokens=40, assistant_model=near).equal(wanted)
    with pytest.raises(ValueError, match="by a model without windows"):
        stock.generate(ids[:1], max_new_tokens=40, assistant_model=ours)


def test_a_chat_goes_on(pair, texts):
    """A cache that is handed back goes on where it ended."""
    (stock, plan, ours), (ids, _) = pair, texts
    cache, said = DynamicCache(config=ours.config), ids[:1]
    for _ in range(3):
        said = torch.cat([said, ids[1:2, :6]], 1)
        with trying(stock, Edit(plan)):
            wanted = stock.generate(said, max_new_tokens=7, use_cache=False)
        said = ours.generate(said, max_new_tokens=7, past_key_values=cache)
        assert said.equal(wanted)


@torch.no_grad()
def test_padding_moves_the_sinks(pair, texts):
    """A padded row is the row without padding: its sinks are its own first tokens."""
    (stock, plan, ours), (ids, mask) = pair, texts
    places = (mask.cumsum(1) - 1).clamp(min=0)
    own = {"attention_mask": mask, "position_ids": places}
    for model, context in ((ours, nullcontext()), (stock, trying(stock, Edit(plan)))):
        with context:
            padded = model(ids, use_cache=False, **own).logits[1, 9:]
            assert apart(padded, model(ids[1:2, 9:], use_cache=False).logits[0]) < 1e-5
    padded = fed(ours, ids, mask, [12] + [1] * 25)[0][1, 9:]
    assert apart(padded, ours(ids[1:2, 9:], use_cache=False).logits[0]) < 1e-5
    with trying(stock, Edit(plan_of(stock, sinks=0))):
        other = stock(ids[1:2, 9:], use_cache=False).logits[0]
    assert apart(padded, other) > 0.01


@pytest.mark.parametrize("sinks", [0, SINKS])
@torch.no_grad()
def test_rows_of_a_cache(texts, sinks):
    """A cache is repeated, reordered, narrowed to some rows and emptied, as one of full heads."""
    stock, ids = tiny.model("llama-gqa"), texts[0]
    plan, ours = plan_of(stock, sinks=sinks), copy.deepcopy(stock)
    cut_heads(ours, resolve(plan, ours))
    cache = DynamicCache(config=ours.config)
    ours(ids[:1, :20], past_key_values=cache)
    cache.batch_repeat_interleave(3)
    text = torch.cat([ids[:1, :20].expand(3, -1), ids[:, 20:28]], 1)
    ours(text[:, 20:28], past_key_values=cache)
    order = torch.tensor([2, 0])
    cache.batch_select_indices(order)
    cache.reorder_cache(torch.tensor([1, 0]))
    text = torch.cat([text[[0, 2]], ids[:2, 28:]], 1)
    got = ours(text[:, 28:], past_key_values=cache).logits
    with trying(stock, Edit(plan)):
        wanted = stock(text, use_cache=False).logits
    assert apart(got, wanted[:, 28:]) < 1e-5 < apart(got, wanted.flip(0)[:, 28:])
    with pytest.raises(ValueError, match="older keys are gone"):
        cache.crop(-20)
    with pytest.raises(ValueError, match="by a number below 0, not 5"):
        cache.layers[0].crop(5)
    cache.reset()
    cache.reorder_cache(torch.tensor([1, 0]))
    assert apart(ours(text, past_key_values=cache).logits, wanted) < 1e-5


@torch.no_grad()
def test_attention_weights(pair, texts):
    """A window takes the weights of what it hides, and the others make up for them."""
    (stock, _, ours), (ids, _) = pair, texts
    for model in (stock, ours):
        model.set_attn_implementation("eager")
    whole = stock(ids, output_attentions=True, use_cache=False).attentions[0]
    got = ours(ids, output_attentions=True, use_cache=False).attentions
    cache = DynamicCache(config=ours.config)
    ours(ids[:, :-1], past_key_values=cache)
    last = ours(ids[:, -1:], past_key_values=cache, output_attentions=True).attentions
    for model in (stock, ours):
        model.set_attn_implementation("sdpa")
    i, j = torch.arange(37)[:, None], torch.arange(37)
    seen = whole * ((i - j < SIZE) | (j < SINKS))
    assert (got[0] - seen / seen.sum(-1, keepdim=True)).abs().max() < 1e-5
    assert (got[0] - whole).abs().max() > 0.01
    for one, end in zip(got, last, strict=True):
        assert (end - one[:, :, -1:]).abs().max() < 1e-5


@torch.no_grad()
def test_tokens_are_taken_back(pair, texts):
    (_, _, ours), (ids, _) = pair, texts
    wanted, cache = ours(ids, use_cache=False).logits, DynamicCache(config=ours.config)
    ours(ids[:, :30], past_key_values=cache)
    cache.crop(-20)
    assert cache.get_seq_length() == 10
    got = ours(ids[:, 10:], past_key_values=cache).logits
    assert apart(got, wanted[:, 10:]) < 1e-5
    ours(ids[:, :1], past_key_values=cache)
    with pytest.raises(ValueError, match="take back 1 tokens, not 2"):
        cache.crop(-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_the_cache_holds_what_the_formula_says(dtype):
    """2 x head_dim numbers of K and V per held token: all of full heads, S + W of the others."""
    model = tiny.model("llama-gqa", max_position_embeddings=4096).to(dtype)
    cut_heads(model, resolve(plan_of(model), model))
    cache, ids = DynamicCache(config=model.config), torch.randint(5, tiny.VOCAB, (2, 4096))
    model(ids[:, :4095], past_key_values=cache, logits_to_keep=1)
    model(ids[:, 4095:], past_key_values=cache)
    stores = [part for layer in cache.layers for part in (layer, getattr(layer, "full", None))]
    held = sum(s.keys.nbytes + s.values.nbytes for s in stores if s is not None)
    near = sum(map(len, FORMS))
    heads = 12 - near
    formula = 2 * 2 * 10 * dtype.itemsize * (heads * 4096 + near * (SIZE + SINKS))
    assert held == formula == 2 * model_cost(model, 4096).kv_cache_bytes
    assert KVCache.of(model).elements(4) == 2 * 10 * 12 * 4
    few = DynamicCache(config=model.config)
    for token in ids[:1, : SIZE + 1].split(1, 1):
        model(token, past_key_values=few)
    assert few.layers[0].keys.shape[2] == SIZE + 1


def test_caches_that_do_not_fit(pair, texts):
    (stock, _, ours), (ids, _) = pair, texts
    filled = stock(ids, use_cache=True).past_key_values
    moving = DynamicCache(config=ours.config)
    moving.offloading = True  # it would move the layers that it knows
    for cache in (StaticCache(config=stock.config, max_cache_len=64), filled, moving):
        with pytest.raises(ValueError, match="need an empty DynamicCache"):
            ours(ids[:, :1], past_key_values=cache)
    with pytest.raises(ValueError, match="need an empty DynamicCache"):
        ours.generate(ids, cache_implementation="static", max_new_tokens=3)


def test_kernels_without_a_mask_per_head(pair, texts):
    _, _, ours = pair
    other = copy.deepcopy(ours)
    other.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'sdpa' or 'eager', not 'flash_attention_2'"):
        other(texts[0], attention_mask=None)


def test_gradients_and_packed_texts(pair, texts):
    (stock, plan, ours), (ids, _) = pair, texts
    stock, ours = copy.deepcopy(stock), copy.deepcopy(ours)
    with trying(stock, Edit(plan)):
        stock(ids, labels=ids, use_cache=False).loss.backward()
    ours(ids, labels=ids, use_cache=False).loss.backward()
    for (name, one), other in zip(ours.named_parameters(), stock.parameters(), strict=True):
        if "self_attn" not in name:  # those stand in another order
            assert apart(one.grad, other.grad) < 1e-4
    places = torch.cat([torch.arange(20), torch.arange(17)])[None]
    packed = ours(ids[:1], position_ids=places, use_cache=False).logits
    assert apart(packed[:, 20:], ours(ids[:1, 20:], use_cache=False).logits) < 1e-5


def test_the_trainer_trains_it(pair, texts, tmp_path):
    (_, _, ours), (ids, _) = pair, texts
    model = copy.deepcopy(ours)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    settings = {"max_steps": 2, "report_to": "none", "use_cpu": True, "save_strategy": "no"}
    settings |= {"activation_checkpointing": True, "learning_rate": 1e-2}
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=3, **settings)
    trainer = Trainer(model, args, train_dataset=rows)
    trainer.train()
    first, last = ours(ids, labels=ids).loss, model(ids, labels=ids).loss
    assert last < first


def test_with_an_empty_layer_and_uneven_heads(tmp_path):
    """Heads are removed, then others get a window, in one plan and one after the other."""
    model = tiny.model("llama-gqa")
    kept = [(), (0, 1), range(6), range(2, 6)]
    keep = {a.path: tuple(heads) for a, heads in zip(attention_of(model), kept, strict=True)}
    plan = plan_of(model, keep=keep)
    prove(model, resolve(plan, model), tmp_path / "cut")
    heads = [(a.kv_heads, a.window_heads) for a in attention_of(model)]
    assert heads == [(0, 0), (1, 1), (3, 0), (2, 1)]


WRONG = [
    *({"size": SIZE + more} for more in (-7, -3, -2, -1, 1, 2, 3, 9)),
    *({"sinks": sinks} for sinks in (0, 1, 2, 4, 5, 6, 11)),
    *(
        {"flipped": (layer, head)}
        for layer, head in product(range(4), range(3))
        if (layer, head) != (0, 0)
    ),
    *({"swapped": (layer, *heads)} for layer in range(4) for heads in ((0, 1), (1, 2), (0, 2))),
    {"full": True},
    {"flipped": (0, 0)},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_wrong_windows_have_no_proof(pair, wrong):
    """A wrong size, wrong sinks, the form of one head, or the order of two heads."""
    stock, _, _ = pair
    expected = _expected(pair)
    harmed = copy.deepcopy(stock)
    forms = [set(heads) for heads in FORMS]
    if "flipped" in wrong:
        forms[wrong["flipped"][0]] ^= {wrong["flipped"][1]}
    other = plan_of(
        stock,
        [()] * 4 if "full" in wrong else list(map(tuple, forms)),
        wrong.get("size", SIZE),
        wrong.get("sinks", SINKS),
    )
    cut_heads(harmed, resolve(other, harmed))
    if "swapped" in wrong:
        _swap(harmed, *wrong["swapped"])
    with pytest.raises(ProofError, match="The proof failed"):
        equivalence.conclude(expected, probes.probe(harmed, expected.inputs))


def test_the_right_windows_have_one(pair):
    expected = _expected(pair)
    proof = equivalence.conclude(expected, probes.probe(pair[2], expected.inputs))
    names = {"window shorter by one", "no sinks", "forms shifted by one head"}
    assert set(proof.windows) == names
    assert min(proof.windows.values()) > 0.01


def _expected(pair, known={}):  # noqa: B006  (it is measured once)
    if not known:
        stock, plan, _ = pair
        known["it"] = equivalence.expect(stock, resolve(plan, stock))
    return known["it"]


@torch.no_grad()
def _swap(model, layer, one, other):
    """Exchange the values of two KV heads, as a wrong order would."""
    weight = attention_of(model)[layer].module.v_proj.weight.view(3, 10, -1)
    weight[[one, other]] = weight[[other, one]]


DAMAGED = [
    ("window", None, "windows, but no window"),
    ("window", {"size": 0, "sinks": 3}, "no size and sinks"),
    ("window", {"size": 8}, "no size and sinks"),
    ("window_heads", 4, "a number of its 3 KV heads, not 4"),
    ("window_heads", -1, "a number of its 3 KV heads, not -1"),
    ("window_heads", True, "a number of its 3 KV heads, not True"),
]


@pytest.mark.parametrize(("name", "value", "said"), DAMAGED, ids=lambda value: str(value)[:30])
def test_damaged_configs(pair, name, value, said):
    config = copy.deepcopy(pair[2].config)
    if name == "window":
        config.headprune["window"] = value
    else:
        next(iter(config.headprune["layout"].values()))["window_heads"] = value
    with pytest.raises(ValueError, match=said):
        modeling_headprune.LlamaForCausalLM(config)


def test_plans_that_do_not_fit(pair):
    stock, plan, ours = pair
    content = json.loads(plan.model_dump_json())
    with pytest.raises(ValueError, match="no window: size and sinks"):
        Plan.model_validate({**content, "window": None})
    path = next(iter(content["attentions"]))
    content["attentions"][path]["window"] = [7]
    with pytest.raises(PlanError, match="names KV head 7"):
        resolve(Plan.model_validate(content), stock)
    for other in (plan_of(ours, [(1,)] * 4), plan_of(ours, size=SIZE + 1)):
        with pytest.raises(PlanError, match="has windows already"):
            resolve(other.model_copy(update={"model": None}), ours)
    for case in ("bert-mlm", "mistral", "whisper"):
        model = tiny.model(case)
        with pytest.raises(PlanError, match="cannot have windows"):
            resolve(_forced(model), model)
    ragged = {a.path: tuple(range(1, 6)) for a in attention_of(stock)}
    with pytest.raises(PlanError, match="Windows need equal groups"):
        resolve(plan_of(stock, keep=ragged), stock, ragged=True)


def _forced(model):
    parts = {
        a.path: AttentionPlan(
            query_heads=a.query_heads, kv_heads=a.kv_heads, keep=a.query_ids, window=(0,)
        )
        for a in attention_of(model)
    }
    return Plan(unit=Unit.KV_GROUP, window=Window(size=4), attentions=parts)


def test_a_windowed_model_has_no_other_mask(pair):
    """Nothing that replaces its attention function may forget its windows."""
    _, _, ours = pair
    narrow = windowed([Narrowed(attention_of(ours)[0], (0,), (4, 1))])
    with pytest.raises(PlanError, match="has windows already"), narrow:
        pass


def test_bfloat16(pair, texts):
    (stock, plan, ours), (ids, mask) = pair, texts
    stock, ours = copy.deepcopy(stock).bfloat16(), copy.deepcopy(ours).bfloat16()
    own = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad(), trying(stock, Edit(plan)):
        wanted = stock(ids, use_cache=False, **own).logits[mask.bool()]
    with torch.no_grad():
        got, cache = fed(ours, ids, mask, [12] + [1] * 25)
    assert cache.layers[0].keys.dtype == torch.bfloat16
    assert apart(got[mask.bool()].float(), wanted.float()) < 0.03


def test_narrowed_names_what_changes(pair):
    stock, plan, _ = pair
    each = narrowed(resolve(plan, stock))
    assert [n.kv_positions for n in each] == [(0, 1, 2), (0, 2), (1,)]
    assert {n.window for n in each} == {(SIZE, SINKS)}
