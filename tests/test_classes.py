"""Every class that transformers' auto mappings give for a supported family, cut once."""

import json
import re

import pytest
import torch
import transformers

import headprune
from headprune.errors import FamilyError, HeadpruneError
from headprune.family import FAMILIES
from headprune.model import probes
from headprune.model.attention import attention_of
from headprune.model.gating import fixed, gated
from tests import classes, tiny
from tests.marks import slow_unless

CLASSES = classes.classes_of(tiny.present(*FAMILIES))
# transformers builds them for whatever config its mapping names, from a part that this one lacks
FOREIGN = {"JevForDecision"}
LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")


def one_per_head():
    """The first class of every kind of head: what it is called behind the name of its family."""
    first = {}
    for family, name in CLASSES:
        head = re.search(r"(For|Model|Backbone|LMHead|Encoder).*", name)
        first.setdefault(head[0] if head else name, (family, name))
    return {*first.values()}


FAST = one_per_head() | {("bart", "BartForSequenceClassification"), ("bert", "BertLMHeadModel")}


@pytest.mark.parametrize(
    ("family", "name"), slow_unless(lambda *case: case in FAST, CLASSES), ids=str
)
def test_a_class_is_cut_or_refused_in_a_sentence(family, name, tmp_path):
    source, result = tmp_path / "model", tmp_path / "cut"
    if name in FOREIGN:
        classes.build(family, tiny.model(family).__class__.__name__).save_pretrained(source)
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
        with pytest.raises(HeadpruneError):
            headprune.prune(source, result, plan={})
        return
    model = classes.build(family, name)
    model.save_pretrained(source)
    plan = classes.plan_of_one_unit(model, tmp_path / "plan.json")
    sees_all = not getattr(model.config, "is_decoder", True) and not model.config.is_encoder_decoder
    if name.endswith(LANGUAGE_MODELS) and sees_all and family != "gpt_neox":
        with pytest.raises(FamilyError, match='lacks "is_decoder": true'):
            headprune.prune(source, result, plan=plan)
        assert not result.exists()
        return
    headprune.prune(source, result, plan=plan)
    pruned = headprune.from_pretrained(result)
    assert type(pruned).__mro__[1] is getattr(transformers, name) or type(pruned).__name__ == name


def test_an_encoder_that_is_a_decoder_is_a_language_model(tmp_path):
    model = classes.build("bert", "BertLMHeadModel", is_decoder=True)
    model.save_pretrained(tmp_path / "model")
    plan = classes.plan_of_one_unit(model, tmp_path / "plan.json")
    headprune.prune(tmp_path / "model", tmp_path / "cut", plan=plan)
    proof = json.loads((tmp_path / "cut" / "headprune.json").read_text())["proof"]
    assert "logits_decoded_with_cache" in proof["probes"]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("bert", "BertForMultipleChoice"),
        ("bart", "BartForSequenceClassification"),
        ("dinov2", "Dinov2Backbone"),
    ],
)
def test_what_a_class_gives_moves_with_its_heads(family, name):
    model = classes.build(family, name)
    inputs, attentions = probes.probe_inputs(model), attention_of(model)
    whole = probes.probe(model, inputs)
    gates = [torch.ones(a.query_heads) for a in attentions]
    gates[0][0] = 0
    with gated(attentions, fixed(gates)):
        without = probes.probe(model, inputs)
    assert all((whole[output] - without[output]).abs().max() > 1e-6 for output in whole)


def test_a_model_that_does_not_run_is_refused_in_a_sentence(tmp_path):
    name = "Data2VecVisionForSemanticSegmentation"
    model = classes.build("data2vec-vision", name, out_indices=[3, 5, 7, 11])
    model.save_pretrained(tmp_path / "model")
    plan = classes.plan_of_one_unit(model, tmp_path / "plan.json")
    with pytest.raises(HeadpruneError, match=f"does not run as the {name}"):
        headprune.prune(tmp_path / "model", tmp_path / "cut", plan=plan)
