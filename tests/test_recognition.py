"""Models without a row in the table of families: recognised by structure, proven on a twin."""

import inspect as inspect_module
import json
from pathlib import Path

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
)
from transformers.models.cwm.modeling_cwm import CwmAttention
from transformers.models.llama import configuration_llama, modeling_llama

import headprune
from headprune.context import Context
from headprune.errors import CheckpointError, FamilyError, PlanError
from headprune.family import FAMILIES, llama
from headprune.model.attention import attention_of, family_of, identity
from headprune.model.cost import model_cost
from headprune.model.inspection import inspect
from headprune.model.open import Model, open_model
from headprune.model.recognition import recognised, row_of
from headprune.model.skeleton import without_weights
from headprune.planning.choose import CutRequest
from headprune.proof import twins
from headprune.result.prune import prune
from headprune.schemas.plan import AttentionPlan, Plan
from headprune.surgery.cut import resolve
from headprune.tensors.units import Unit
from tests import tiny
from tests.cutting import prove, uneven_plan
from tests.marks import slow_unless

_LATENT = tiny.DIFFERENCES["deepseek_v3"]
_DELTA = {
    **{"num_hidden_layers": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 32},
}
# the last layers read K and V of others
_SHARED = {
    **{"num_hidden_layers": 12, "num_kv_shared_layers": 6, "vocab_size_per_layer_input": 256},
    **{"hidden_size_per_layer_input": 8},
}
# settings beyond tiny.SIZES, and whether a plain config holds an even cut
TYPES = {
    "qwen3_5_text": (_DELTA, True),  # gates in q_proj, delta nets between
    "qwen3_next": (_DELTA, True),
    "lfm2": ({}, True),  # short convolutions between, out_proj
    "nemotron_h": ({"layers_block_type": ["attention", "mamba", "attention", "mlp"]}, True),
    "falcon_h1": ({}, True),  # Mamba beside attention
    "minimax": ({}, False),  # lightning attention between
    "afmoe": ({}, True),  # a gate of every number
    "laguna": ({}, False),  # a gate of every head, in layers of other widths
    "granite_swa": ({}, True),  # sinks
    "flex_olmo": ({}, False),  # norms over all heads
    "deepseek_v2": (_LATENT, False),
    "minicpm3": (_LATENT, False),
    "glm4_moe_lite": (_LATENT, False),
    "modernbert-decoder": ({}, False),
    "rembert": ({}, False),
    "plbart": ({}, False),
    "cwm": ({}, True),
    "cohere2_moe": ({}, True),
    "dots1": ({}, True),
    "hy_v3": ({}, True),
    "llama4_text": ({}, True),  # no base model of its own
    "mimo_v2_flash": ({"v_head_dim": 4}, False),  # V narrower than K
    "axk2": (_LATENT, False),  # query and gate from one projection
    "gemma3n_text": (_SHARED, False),
    "gemma4_text": (_SHARED, False),  # two widths of a head
}
FAST = {"qwen3_5_text", "nemotron_h", "laguna", "flex_olmo", "minicpm3", "rembert", "gemma4_text"}
PRESENT = [name for name in TYPES if name in CONFIG_MAPPING and name not in FAMILIES]


def build(name, monkeypatch):
    """A tiny model of a type that the table lacks."""
    cls = CONFIG_MAPPING[name]
    monkeypatch.setattr(tiny, "family_of_case", lambda case: case)
    settings = {**tiny._sizes(cls), **TYPES.get(name, ({}, False))[0]}
    monkeypatch.setattr(tiny, "config", lambda case, **more: cls(**{**settings, **more}))
    return tiny.model(name)


@pytest.mark.parametrize("name", slow_unless(FAST.__contains__, PRESENT))
def test_gated_is_cut_is_reloaded(name, tmp_path, monkeypatch):
    model = build(name, monkeypatch)
    empty = [] if family_of(model.config).keeps_a_head else [-1]
    result = prove(model, resolve(uneven_plan(model, *empty), model), tmp_path / "uneven")
    assert result.control is not None and result.control > 1e2 * result.tolerance
    model = build(name, monkeypatch)
    assert family_of(model.config).native is TYPES[name][1]
    if TYPES[name][1]:
        parts = {
            a.path: AttentionPlan(
                query_heads=a.query_heads,
                kv_heads=a.kv_heads,
                keep=tuple(range(a.query_heads // a.kv_heads)),
            )
            for a in attention_of(model)
        }
        plan = Plan(unit=Unit.KV_GROUP, attentions=parts, model=identity(model, "tiny"))
        prove(model, resolve(plan, model), tmp_path / "even")
        assert "auto_map" not in (tmp_path / "even" / "config.json").read_text()


def test_kv_heads_that_stay_are_counted_apart(tmp_path, monkeypatch):
    tiny.save(net := build("gemma4_text", monkeypatch), tmp_path / "model")
    plan = {a.path: [0] for a in attention_of(net)}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    monkeypatch.setattr(twins, "prove", lambda skeleton: None)
    out = prune(tmp_path / "model", tmp_path / "out", CutRequest(plan=tmp_path / "plan.json"))
    # of 12 layers, the last 6 read K and V of others
    owning, kv_heads = 6, net.config.num_key_value_heads
    assert out.manifest.kv_heads == (owning * kv_heads, owning * kv_heads)
    assert out.manifest.query_heads[1] == out.manifest.query_heads[0] - 12
    assert model_cost(out.model).kv_heads == owning * kv_heads


PLAIN = [row.model_type for row in llama.ROWS if row == llama.llama_like(row.model_type)]


@pytest.mark.parametrize("name", slow_unless({"llama", "mixtral"}.__contains__, PLAIN))
def test_structure_says_what_plain_rows_say(name):
    config, row = tiny.config(name), FAMILIES[name]
    read = recognised(config)
    assert read.projections == row.projections
    assert (dict(read.per_head), dict(read.full_width_norms)) == ({}, {})
    assert set(read.size_attributes.items()) >= set(row.size_attributes.items())
    assert (read.native, read.fewer_kv_heads) == (True, "native")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bitnet", "has 'attn_sub_norm.weight' of shape .* whose part in every head is not known"),
        # its cross attention alone would be read
        ("umt5", "has 'relative_attention_bias.weight' of shape"),
        ("mamba", "no module of its MambaModel has the projections of attention"),
    ],
)
def test_what_cannot_be_read_is_refused(name, why, monkeypatch):
    model = build(name, monkeypatch)
    assert row_of(model.config) is None
    with pytest.raises(FamilyError, match=why):
        attention_of(model)


def own_code(folder):
    """A Llama under another name, with its code beside the weights."""
    tiny.save(tiny.model("llama-gqa"), folder)
    for kind, module in (("modeling", modeling_llama), ("configuration", configuration_llama)):
        code = Path(inspect_module.getfile(module)).read_text(encoding="utf-8")
        code = code.replace("from ...", "from transformers.").replace("Llama", "Own")
        code = code.replace('model_type = "llama"', 'model_type = "own"')
        code = code.replace(".configuration_llama", ".configuration_own")
        (folder / f"{kind}_own.py").write_text(code, encoding="utf-8")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModel": "modeling_own.OwnModel",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_code_that_comes_with_a_model_is_cut_with_it(tmp_path):
    folder = own_code(tmp_path / "own")
    paths = [a.path for a in attention_of(tiny.model("llama-gqa"))]
    plan = {path: [2 * n % 4, 2 * n % 4 + 1] for n, path in enumerate(paths)}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(CheckpointError, match="contains custom code"):
        headprune.prune(folder, tmp_path / "out", plan=tmp_path / "plan.json")
    remote = {"trust_remote_code": True}
    out = headprune.prune(folder, tmp_path / "out", plan=tmp_path / "plan.json", **remote)
    assert out.manifest.brings_code and (tmp_path / "out" / "modeling_own.py").exists()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "with the code of its original" in card and "trust_remote_code=True" in card
    assert headprune.verify(tmp_path / "out", **remote).passed
    assert headprune.verify(tmp_path / "out", against=folder, **remote).passed
    for source, name in ((folder, "padded"), (tmp_path / "out", "served")):
        if name == "padded":
            headprune.pad(source, tmp_path / name, multiple_of=4, **remote)
        else:
            headprune.export(source, tmp_path / name, to="vllm", **remote)
        assert (tmp_path / name / "modeling_own.py").exists()
        headprune.from_pretrained(tmp_path / name, **remote)
    tiny.save(tiny.model("llama-gqa"), tmp_path / "llama")
    wanted = headprune.prune(tmp_path / "llama", tmp_path / "plain", plan=tmp_path / "plan.json")
    ids = torch.tensor([[5, 6, 7, 8]])
    net = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(net).__name__ == "OwnForCausalLM"
    assert torch.equal(net(ids).logits, wanted.model(ids).logits)
    whole = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert not torch.allclose(net(ids).logits, whole(ids).logits)
    how = {"seq_len": 16, "speed": False, **remote}
    report = headprune.evaluate(tmp_path / "out", data=text(tmp_path), against=folder, **how)
    assert report.model.task == "causal-lm"
    assert "perplexity" in {one.name for one in report.differences}
    (tmp_path / "uneven.json").write_text(json.dumps({"model.layers.0.self_attn": [0, 1]}))
    with pytest.raises(PlanError, match="does not fit a plain config"):
        headprune.prune(folder, tmp_path / "no", plan=tmp_path / "uneven.json", **remote)


def text(folder):
    (folder / "text.txt").write_text(tiny.text(600))
    return folder / "text.txt"


def count_heads(monkeypatch):
    """Plant a forward that scales every head by its number, of which no size tells."""
    original = CwmAttention.forward

    def scaled(module, inputs):
        heads = inputs[0].unflatten(-1, (-1, tiny.SIZES["head_dim"]))
        numbers = torch.arange(1.0, heads.shape[-2] + 1)
        return ((heads * numbers[:, None]).flatten(-2),)

    def forward(self, *args, **kwargs):
        hook = self.o_proj.register_forward_pre_hook(scaled)
        try:
            return original(self, *args, **kwargs)
        finally:
            hook.remove()

    monkeypatch.setattr(CwmAttention, "forward", forward)


@pytest.mark.parametrize("planted", [False, True])
def test_a_forward_that_counts_heads_fails_on_the_twin(planted, tmp_path, monkeypatch):
    tiny.save(build("cwm", monkeypatch), tmp_path / "model")
    monkeypatch.setattr(twins, "_PROVEN", {})
    model = open_model(tmp_path / "model")
    assert inspect(tmp_path / "model").family == "cwm"
    plan = {a.path: [0, 1] for a in attention_of(model.net)}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    request, lines = CutRequest(plan=tmp_path / "plan.json"), []
    context = Context(line=lambda text, good=None: lines.append(text))
    if planted:
        count_heads(monkeypatch)
        with pytest.raises(FamilyError, match="'cwm' has .* does something else with heads"):
            prune(tmp_path / "model", tmp_path / "out", request, context=context)
        assert not (tmp_path / "out").exists()
        return
    prune(tmp_path / "model", tmp_path / "out", request, context=context)
    assert any("recognised by structure, proven on a tiny twin" in line for line in lines)
    assert headprune.verify(tmp_path / "out").passed


# of molmo2 no small one can be built, so that the twin is of its text model
WHOLE = ["qwen3_5", "qwen3_5_moe", "llama4", "lfm2_vl", "got_ocr2", "jamba", "molmo2", "helium"]


@pytest.mark.parametrize(
    "name",
    slow_unless({"llama4", "molmo2"}.__contains__, [n for n in WHOLE if n in CONFIG_MAPPING]),
)
def test_a_twin_of_a_model_of_full_size_is_proven(name, monkeypatch):
    config = CONFIG_MAPPING[name]()
    mappings = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)
    cls = next(known[type(config)] for known in mappings if type(config) in known)
    monkeypatch.setattr(twins, "_PROVEN", {})
    model = Model("", config, {}, torch.float32)
    vars(model)["skeleton"] = without_weights(cls, config)
    before = torch.get_rng_state()
    assert (twins.refuse_unproven(model) or 0) > 0
    assert torch.equal(torch.get_rng_state(), before)  # the draws of a command stay its own


def test_layers_without_heads_are_said_once(tmp_path, monkeypatch):
    tiny.save(tiny.model("llama-gqa"), tmp_path / "llama")
    tiny.save(build("qwen3_next", monkeypatch), tmp_path / "hybrid")
    notes = inspect(tmp_path / "hybrid").notes
    assert "6 of 8 layers have no heads: they stay." in notes
    assert not any("have no heads" in note for note in inspect(tmp_path / "llama").notes)


@pytest.mark.parametrize("case", tiny.present("llava", "gemma3", "qwen2_vl"))
def test_the_twin_of_a_text_model_leaves_the_config_as_it_is(case):
    net = tiny.model(case)
    before = net.config.to_dict()
    text = twins._text_model(net)
    assert text is not None and text.config.architectures == [type(text).__name__]
    assert net.config.to_dict() == before and net.config.get_text_config().architectures is None
