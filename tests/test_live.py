"""headprune.apply and undo: the forms of a plan in memory, and back."""

import copy

import pytest
import torch
from accelerate import dispatch_model

import headprune
from headprune.errors import PlanError
from headprune.model.cost import KVCache
from headprune.surgery.edit import Edit, trying
from tests import tiny
from tests.cutting import uneven_plan
from tests.test_layer_windows import layers_of
from tests.test_windows import apart, plan_of

PLANS = {
    "windows of heads": ("llama-gqa", plan_of),
    "windows of layers": ("qwen2", layers_of),
    "another class": ("mistral", layers_of),
    "fewer heads": ("llama-gqa", uneven_plan),
    "fewer heads of an encoder": ("bert-mlm", uneven_plan),
    "fewer heads of GPT-2": ("gpt2", uneven_plan),
}


@torch.no_grad()
def logits(model, ids):
    return model(ids).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PLANS)
def test_there_and_back(name, dtype, tmp_path):
    case, planned = PLANS[name]
    own = {"sliding_window": None} if case == "mistral" else {}
    model = tiny.model(case, dtype, **own)
    untouched, plan = copy.deepcopy(model), planned(model)
    ids = torch.randint(5, tiny.VOCAB, (2, 40), generator=torch.Generator().manual_seed(0))
    config, names = model.config.to_dict(), [name for name, _ in model.named_parameters()]
    with trying(untouched, Edit(plan)):
        wanted = logits(untouched, ids)
    plan.write(tmp_path / "plan.json")
    headprune.apply(model, plan if dtype is torch.float32 else tmp_path / "plan.json")
    allowed = 1e-5 if dtype is torch.float32 else 3e-2  # of one forward in bfloat16
    assert apart(logits(model, ids), wanted) < allowed < apart(wanted, logits(untouched, ids))
    with pytest.raises(PlanError, match="has a plan already"):
        headprune.apply(model, plan)
    headprune.undo(model)
    assert torch.equal(logits(model, ids), logits(untouched, ids))
    assert model.config.to_dict() == config and type(model) is type(untouched)
    assert [name for name, _ in model.named_parameters()] == names
    headprune.apply(model, plan)
    assert apart(logits(model, ids), wanted) < allowed


def test_tokens_of_windows():
    model = tiny.model("llama-gqa")
    ids = torch.randint(5, tiny.VOCAB, (1, 40), generator=torch.Generator().manual_seed(1))
    how = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    before = model.generate(ids, **how)
    headprune.apply(model, plan_of(model))
    narrow = model.generate(ids, **how)
    held = KVCache.of(model).elements(51)
    headprune.undo(model)
    assert held < KVCache.of(model).elements(51)
    assert torch.equal(model.generate(ids, **how), before) and not torch.equal(narrow, before)


def test_what_is_refused():
    model = tiny.model("llama-gqa")
    with pytest.raises(PlanError, match="No plan was applied"):
        headprune.undo(model)
    plan = plan_of(model)
    with pytest.raises(PlanError, match="fingerprint"):
        headprune.apply(
            tiny.model("llama-mha"),
            plan_of(tiny.model("llama-mha")).model_copy(update={"model": plan.model}),
        )
    path, part = next(iter(plan.attentions.items()))
    merged = part.model_copy(update={"groups": ((0, 1), (2,)), "window": None})
    with pytest.raises(PlanError, match="merges KV heads"):
        headprune.apply(
            model, plan.model_copy(update={"attentions": {**plan.attentions, path: merged}})
        )


def test_a_model_that_was_moved_goes_back():
    model = tiny.model("llama-gqa")
    ids = torch.randint(5, tiny.VOCAB, (2, 20), generator=torch.Generator().manual_seed(2))
    wanted = logits(copy.deepcopy(model).double(), ids)
    headprune.apply(model, uneven_plan(model))
    model.to(torch.float64)
    headprune.undo(model)
    assert torch.equal(logits(model, ids), wanted)


def test_what_happens_in_between_stays():
    model = tiny.model("llama-gqa")
    wanted, ids = copy.deepcopy(model).train(), torch.full((1, 20), 7)
    wanted.resize_token_embeddings(tiny.VOCAB + 15)
    headprune.apply(model, plan_of(model))
    model.train()
    with torch.no_grad():
        model.resize_token_embeddings(tiny.VOCAB + 15)
        new = model.get_input_embeddings().weight[tiny.VOCAB :]
        wanted.get_input_embeddings().weight[tiny.VOCAB :] = new
        wanted.lm_head.weight.copy_(model.lm_head.weight)
    headprune.undo(model)
    assert all(each.training for each in model.modules())
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == tiny.VOCAB + 15
    assert torch.equal(logits(model, ids), logits(wanted, ids))
    assert model.config.to_dict() == wanted.config.to_dict()


def test_modules_share_their_settings_afterwards():
    model = tiny.model("qwen2_vl")
    inner = model.config.text_config
    sharing = [m for m in model.modules() if getattr(m, "config", None) is inner]
    assert len(sharing) > 1
    headprune.apply(model, uneven_plan(model))
    headprune.undo(model)
    assert model.config.text_config is inner and all(m.config is inner for m in sharing)


def test_a_model_with_hooks_is_refused():
    model = tiny.model("llama-gqa")
    plan = plan_of(model)
    hooked = dispatch_model(copy.deepcopy(model), {"": "cpu"}, force_hooks=True)
    with pytest.raises(PlanError, match="has a forward pass of its own"):
        headprune.apply(hooked, plan)
    # hooks that come later call the new class
    headprune.apply(model, plan)
    ids = torch.randint(5, tiny.VOCAB, (1, 40))
    wanted = logits(model, ids)
    hooked = dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert torch.equal(logits(hooked, ids), wanted)


def test_settings_of_generation_go_back():
    model = tiny.model("whisper")
    model.generation_config.alignment_heads = [[1, 3], [2, 5], [0, 0]]
    headprune.apply(model, uneven_plan(model))
    assert getattr(model.generation_config, "alignment_heads", None) != [[1, 3], [2, 5], [0, 0]]
    headprune.undo(model)
    assert model.generation_config.alignment_heads == [[1, 3], [2, 5], [0, 0]]


def test_a_plan_of_fitted_weights_is_refused(tmp_path):
    tiny.save(tiny.model("llama-gqa"), tmp_path / "m")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(tiny.text(60, seed=seed) for seed in range(40)))
    how = {"calibration_tokens": 512, "seq_len": 32}
    headprune.score(tmp_path / "m", tmp_path / "scores", data=text, **how)
    cut = {"scores": tmp_path / "scores", "keep": 0.5, "refit": text}
    headprune.prune(tmp_path / "m", tmp_path / "out", **cut, **how)
    model = headprune.from_pretrained(tmp_path / "m")
    with pytest.raises(PlanError, match="were fitted or trained"):
        headprune.apply(model, tmp_path / "out" / "plan.json")
