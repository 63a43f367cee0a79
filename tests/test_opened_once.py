"""A command opens its model once; an edit is tried and written without a second look at it."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

import headprune
from headprune.compression.compress import compress
from headprune.config import (
    CalibrationConfig,
    CompressConfig,
    ConvertConfig,
    DataConfig,
    ScoreConfig,
)
from headprune.evidence.score import score, scores_on
from headprune.model import attention, loading, stored
from headprune.model.attention import attention_of
from headprune.model.open import Model, open_model
from headprune.planning.choose import CutRequest
from headprune.result import write as writing
from headprune.result.convert_gqa import convert_gqa
from headprune.result.prune import prune
from headprune.surgery.cut import cut_heads, resolve
from headprune.surgery.edit import Edit, collecting, meta_model, trying
from tests import tiny
from tests.cutting import uneven_plan


@pytest.fixture
def folder(tmp_path):
    return tiny.save(tiny.model("llama-gqa"), tmp_path / "model")


@pytest.fixture
def data(tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(tiny.text(60, i) for i in range(60)))
    return DataConfig(source=str(tmp_path / "text.txt"))


@pytest.fixture
def calls(folder, monkeypatch):
    """Reads of the original and of results, counted by their kind."""
    counts = Counter()

    def counted(module, name, kind, place):
        real = getattr(module, name)

        def call(*args, **kwargs):
            whose = (
                "original" if Path(str(place(*args, **kwargs))).is_relative_to(folder) else "result"
            )
            counts[f"{kind} of the {whose}"] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    counted(AutoConfig, "from_pretrained", "config", lambda place, **_: place)
    counted(stored, "tensors_in", "headers", lambda file: file)
    counted(Model, "weighted", "weights", lambda model: model.source)
    counted(loading, "widening", "widened", lambda _, place, *__: place)
    return counts


ONCE = {"config of the original": 1, "headers of the original": 1, "weights of the original": 1}
PROOF = {"config of the result": 1, "headers of the result": 1, "weights of the result": 1}


def test_prune_opens_its_model_once(folder, data, calls, tmp_path):
    plan = uneven_plan(headprune.from_pretrained(folder))
    calls.clear()
    prune(folder, tmp_path / "out", CutRequest(plan=plan))
    assert calls == {**ONCE, **PROOF}
    calls.clear()
    scores = tmp_path / "scores"
    score(folder, scores, ScoreConfig(criterion=("fisher",), seq_len=16), data)
    assert calls == ONCE
    calls.clear()
    small = CalibrationConfig(seq_len=16)
    prune(folder, tmp_path / "refit", CutRequest(scores=scores, keep=0.5), data, small)
    assert calls == {**ONCE, **PROOF}


def test_prune_walks_its_models_once_each(folder, data, monkeypatch, tmp_path):
    walked = Counter[int]()
    walk = attention._walk

    def counted(net):
        walked[id(net)] += 1
        return walk(net)

    score(folder, tmp_path / "s", ScoreConfig(criterion=("magnitude",)))
    monkeypatch.setattr(attention, "_walk", counted)
    request = CutRequest(scores=tmp_path / "s", keep=0.5)
    prune(folder, tmp_path / "out", request, data, CalibrationConfig(seq_len=16))
    # the skeleton, the model, the skeleton once it is cut, and the result
    assert sorted(walked.values()) == [1, 1, 2]
    net = tiny.model("llama-gqa")
    before = attention_of(net)
    assert before == attention_of(net)
    cut_heads(net, resolve(uneven_plan(net), net))
    assert [a.query_heads for a in before] != [a.query_heads for a in attention_of(net)]


def test_three_criteria_take_one_pass(folder, data, monkeypatch):
    """One forward pass over the text, and one backward."""
    model = open_model(folder)
    texts = []
    backwards = []
    model.net.model.layers[0].register_forward_pre_hook(lambda _, args: texts.append(len(args[0])))
    real = torch.Tensor.backward
    monkeypatch.setattr(
        torch.Tensor, "backward", lambda *args: (backwards.append(None), real(*args))[1]
    )
    criteria = ("fisher", "compensated", "reconstruction")
    config = ScoreConfig(criterion=criteria, seq_len=16, calibration_tokens=512)
    scores, _ = scores_on(model, config, data)
    assert set(scores.scores) == set(criteria)
    assert sum(texts) * 16 == scores.metadata.tokens and len(backwards) == len(texts)
    texts.clear()
    scores_on(model, ScoreConfig(criterion=("wanda",), seq_len=16, calibration_tokens=512), data)
    assert sum(texts) * 16 == scores.metadata.tokens and len(backwards) < 2 * len(texts)


def test_convert_gqa_opens_its_model_once(folder, data, calls, tmp_path):
    convert_gqa(folder, tmp_path / "out", ConvertConfig(kv_budget=0.6, seq_len=16), data)
    assert calls == {**ONCE, **PROOF}


def test_compress_opens_its_model_once_and_writes_one_folder(
    folder, data, calls, tmp_path, monkeypatch
):
    written = []
    real = writing.write_shards

    def noted(pieces, where, *others):
        written.append(where)
        real(pieces, where, *others)

    monkeypatch.setattr(writing, "write_shards", noted)
    config = CompressConfig(keep=0.5, seq_len=16, calibration_tokens=512, held_out_tokens=256)
    result = compress(str(folder), tmp_path / "out", config, {"text": data})
    assert not isinstance(result, tuple) and len(written) == 1
    assert calls == {**ONCE, **PROOF}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["llama-gqa", "gpt2", "bert-mlm", "t5"])
def test_what_is_tried_is_what_is_written(case, dtype, tmp_path):
    place = tiny.save(tiny.model(case).to(dtype), tmp_path / "model")
    model = open_model(place)
    before = {name: weight.clone() for name, weight in model.net.state_dict().items()}
    attentions = model.attentions
    with collecting(model.net, attentions) as tensors, torch.no_grad():
        for attention in attentions:
            attention.output_projection.get_parameter("weight").mul_(0.5)
    edit = Edit(uneven_plan(model.net), tensors)
    inputs = writing.probes.probe_inputs(model.net)
    with trying(model.net, edit):
        tried = writing.probes.probe(model.net, inputs)
    assert all(torch.equal(before[n], weight) for n, weight in model.net.state_dict().items())
    sizes = meta_model(model, edit).num_parameters()
    changes = writing.Changes(writing_record())
    written = writing.write(model, edit, tmp_path / "out", changes)
    assert written.manifest.parameters[1] == sizes < written.manifest.parameters[0]
    reloaded = headprune.from_pretrained(tmp_path / "out", dtype=torch.float32)
    gap = writing.equivalence.difference(tried, writing.probes.probe(reloaded, inputs))
    assert gap < (
        2e-5 if dtype is torch.float32 else 2e-2
    )  # halved weights are rounded to bfloat16
    without = open_model(place)
    with trying(without.net, Edit(edit.plan)):
        other = writing.probes.probe(without.net, inputs)
    assert writing.equivalence.difference(tried, other) > 0.1


def writing_record():
    from headprune.schemas.records import Evidence, Pruning

    return Pruning(evidence=Evidence(kind="plan", id="0" * 64), trained_weights=False)
