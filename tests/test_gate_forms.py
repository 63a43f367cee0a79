"""What gates do to heads: those that others make up for, and windows."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn import functional as F

import headprune
from headprune import from_pretrained
from headprune.config import DataConfig, TrainGatesConfig
from headprune.context import Context
from headprune.errors import HeadpruneError
from headprune.evidence.statistics import collect
from headprune.gates.forms import Correlation, narrowed, predicted
from headprune.gates.gates import COURSE, Gates
from headprune.gates.train_gates import train_gates
from headprune.model.attention import attention_of
from headprune.model.windows import Narrowed, windowed
from headprune.schemas.gates import read_metadata
from headprune.tensors.units import Unit
from tests import tiny

HEADS, WIDTH = 4, 3


def correlated(mean: float) -> torch.Tensor:
    """Inputs of an output projection: some heads tell much of others."""
    draw = torch.Generator().manual_seed(0)
    mixing = torch.randn(6, HEADS * WIDTH, generator=draw, dtype=torch.float64)
    noise = torch.randn(500, HEADS * WIDTH, generator=draw, dtype=torch.float64)
    return (
        torch.randn(500, 6, generator=draw, dtype=torch.float64) @ mixing + noise + mean
    ).float()


@pytest.mark.parametrize("mean", [0.0, 5.0])
def test_open_heads_tell_of_closed_ones_what_least_squares_tell(mean):
    x, gate = correlated(mean), torch.tensor([1.0, 0.0, 1.0, 0.0])
    middle = x.mean(0) if mean else torch.zeros(HEADS * WIDTH)
    about = x - middle
    scale = about.square().mean(0).sqrt()
    matrix = about.T @ about / len(x) / scale / scale[:, None]
    others = Correlation(middle, scale, matrix)
    known = gate.bool().repeat_interleave(WIDTH)
    found = others.predict(gate, x[None])[0]
    # with the ridge of the correlations, on each variance
    penalty = torch.diag(1e-3 * len(x) * scale[known].square())
    moments = about[:, known].T @ about[:, known] + penalty
    wanted = about[:, known] @ torch.linalg.solve(moments, about[:, known].T @ about[:, ~known])
    torch.testing.assert_close(found[:, ~known], wanted + middle[~known], rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(found[:, known], x[:, known], rtol=5e-3, atol=2e-2)
    assert not torch.allclose(found[:, ~known], x[:, ~known], atol=0.5)
    every = others.predict(torch.ones(HEADS), x[None])[0]
    torch.testing.assert_close(every, x, rtol=1e-4, atol=1e-4)
    none = others.predict(torch.zeros(HEADS), x[None])[0]
    torch.testing.assert_close(none, middle.expand_as(none), rtol=0, atol=1e-4)


def test_what_makes_up_for_a_head_has_a_slope():
    """At the ends of a gate, too: only the clip of the draw takes it away."""
    x = correlated(0.0)
    scale = x.square().mean(0).sqrt()
    others = Correlation(torch.zeros(12), scale, x.T @ x / len(x) / scale / scale[:, None])
    for value in (0.0, 0.5, 1.0):
        gate = torch.full((HEADS,), value, requires_grad=True)
        (others.predict(gate, x[None]) * x).sum().backward()
        assert gate.grad is not None
        assert gate.grad.isfinite().all() and (gate.grad.abs() > 1e-3).all()


@pytest.mark.parametrize("steps", [5, 20, 100])
def test_the_course_holds_the_start_and_the_end(steps):
    gates = Gates(attention_of(tiny.model("gpt2")), Unit.HEAD, 0.0, 2 / 3)
    gates.record(0, steps)
    started = gates.open_probability().detach().clone()
    for step in range(1, steps + 1):
        with torch.no_grad():
            gates.log_alpha += 0.01
        gates.record(step, steps)
    assert torch.equal(gates.course[0], started)
    assert torch.equal(gates.course[COURSE], gates.open_probability())
    assert (gates.course[:, 0] >= 0).sum() == min(steps, COURSE) + 1
    assert not torch.equal(gates.course[0], gates.course[COURSE])


@pytest.mark.parametrize("case", ["llama-gqa", "gpt2", "bert-mlm"])
def test_gates_that_others_make_up_for_leave_an_open_model_as_it_is(case):
    net = tiny.model(case)
    attentions = attention_of(net)
    ids = torch.randint(5, tiny.VOCAB, (8, 32), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    parts = collect(net, attentions, [batch], frozenset({"gram", "activations"}))
    device = torch.device("cpu")
    others = [Correlation.of(p, a, device) for p, a in zip(parts, attentions, strict=True)]
    gates = Gates(attentions, Unit.HEAD, 3.0, 2 / 3)
    gates.draws = 1
    with torch.no_grad():
        wanted = net(input_ids=ids).logits
        with predicted(attentions, gates.source, others):
            gates.choose(range(24))
            gates.sample(8)
            torch.testing.assert_close(net(input_ids=ids).logits, wanted, rtol=1e-3, atol=1e-3)
            gates.choose(range(18))
            gates.sample(8)
            assert (net(input_ids=ids).logits - wanted).abs().max() > 1e-2
        assert torch.equal(net(input_ids=ids).logits, wanted)


@pytest.mark.parametrize("padded", [False, True])
def test_a_gate_of_a_window_lies_between_both_ends(padded):
    net = tiny.model("llama-gqa")
    attentions, window = attention_of(net), (6, 2)
    ids = torch.randint(5, tiny.VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids}
    if padded:
        inputs["attention_mask"] = (torch.arange(20) >= torch.tensor([[0], [5]])).long()
    gates = Gates(attentions, Unit.KV_GROUP, 0.0, 2 / 3, by_heads=False)
    some = [Narrowed(attentions[1], (0, 2), window)]
    kept = [unit for unit in range(12) if unit not in (3, 5)]
    with torch.no_grad():
        whole = net(**inputs).logits
        with windowed(some):
            near = net(**inputs).logits
        with narrowed(attentions, gates.source, window):
            torch.testing.assert_close(net(**inputs).logits, whole)
            gates.choose(kept)
            gates.sample(2)
            real = inputs.get("attention_mask", torch.ones_like(ids)).bool()
            torch.testing.assert_close(net(**inputs).logits[real], near[real], rtol=1e-4, atol=1e-5)
            assert not torch.allclose(net(**inputs).logits[real], whole[real], atol=1e-3)
            gates.choose(range(12))
            gates.sample(2)
            torch.testing.assert_close(net(**inputs).logits[real], whole[real])


def test_slopes_of_gates_at_full_attention_are_those_of_scores(tmp_path):
    """Scores of windows are squared sums of the slopes that training takes."""
    from headprune.evidence.windows import slopes

    net = tiny.model("llama-gqa").requires_grad_(False)
    attentions, window = attention_of(net), (6, 2)
    ids = torch.randint(5, tiny.VOCAB, (1, 20), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    gates = [torch.ones(1, 6, requires_grad=True) for _ in attentions]
    with narrowed(attentions, gates.__getitem__, window):
        logits = net(input_ids=ids, use_cache=False).logits[0, :-1]
        F.cross_entropy(logits, ids[0, 1:]).backward()
    (of_batch,) = slopes(net, attentions, [batch], window)
    for gate, slope in zip(gates, of_batch, strict=True):
        torch.testing.assert_close(gate.grad, slope.sum(1), rtol=1e-3, atol=1e-6)
    assert not torch.allclose(gates[0].grad, of_batch[1].sum(1), atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_full": 1.0}, "Nothing would get a window"),
        ({"loss": "answers"}, "leave out --config loss=answers"),
        ({"window": 64}, "leaves nothing out of a context"),
    ],
)
def test_windows_that_cannot_be_are_refused(settings, message, llama_folder, text_file, tmp_path):
    how = {"form": "window", "window": 8, "context_tokens": 64, "steps": 1} | settings
    with pytest.raises(HeadpruneError, match=message):
        headprune.train_gates(llama_folder, tmp_path / "g", data=text_file, **how)
    assert not (tmp_path / "g").exists()


def test_a_model_with_an_empty_layer(llama_folder, text_file, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"model.layers.1.self_attn": [*range(6)]}))
    headprune.prune(llama_folder, tmp_path / "cut", plan=plan)
    how = {"data": text_file, "steps": 2}
    removed = headprune.train_gates(tmp_path / "cut", tmp_path / "g", target_heads=10, **how)
    assert removed.metadata.kept_heads == 10 and removed.metadata.refitted
    again = headprune.prune(tmp_path / "cut", tmp_path / "again", gates=tmp_path / "g")
    assert again.plan.kept_heads == 10
    windows = {"form": "window", "window": 8, "context_tokens": 64}
    run = headprune.train_gates(tmp_path / "cut", tmp_path / "w", **how, **windows)
    assert run.metadata.query_heads == 18 and run.metadata.kept_heads == 8


def test_modules_that_run_twice_start_from_other_scores(text_file, tmp_path):
    folder, lines = tiny.save(tiny.model("albert"), tmp_path / "model"), []
    config = TrainGatesConfig(target_heads=0.5, steps=2)
    context = Context(line=lambda line, good=None: lines.append(line))
    run = train_gates(
        folder, DataConfig(source=str(text_file)), tmp_path / "g", config, context=context
    )
    assert "no scores by compensated" in lines[0] and "text" not in lines[0].split(":")[0]
    assert run.metadata.judgement is not None and not run.metadata.refitted


def test_what_gates_of_an_encoder_leave_out_need_no_text(tmp_path):
    """A refit of all modules: targets of a word make the decoder's moments singular."""
    pairs = tmp_path / "pairs.csv"
    words = tiny.text(900).split()
    lines = [f"{' '.join(words[at : at + 40])},{words[at]}" for at in range(0, 860, 40)]
    pairs.write_text("\n".join(["source,target", *lines]))
    folder = tiny.save(tiny.model("bart"), tmp_path / "model")
    run = headprune.train_gates(
        folder,
        tmp_path / "g",
        data=pairs,
        text_column="source,target",
        target_heads=0.5,
        attention="encoder",
        steps=2,
    )
    assert not run.metadata.refitted and run.metadata.judgement is not None


@pytest.mark.parametrize("unit", [None, "layer"])
def test_gates_of_windows_make_a_model_with_windows(unit, llama_folder, text_file, tmp_path):
    how = {"form": "window", "window": 8, "context_tokens": 64, "steps": 6, "gate_lr": 0.5}
    run = headprune.train_gates(
        llama_folder, tmp_path / "g", data=text_file, keep_full=0.25, unit=unit, **how
    )
    assert run.metadata == read_metadata(tmp_path / "g")
    assert run.metadata.judgement is not None and run.metadata.window.size == 8
    assert run.metadata.kept_heads == 6 and not run.metadata.trained_weights
    done = headprune.convert_swa(llama_folder, tmp_path / "out", gates=tmp_path / "g")
    assert done.manifest.done.heads == 9 and done.manifest.done.evidence.kind == "gates"
    with pytest.raises(HeadpruneError, match="give them to headprune convert-swa --gates"):
        headprune.prune(llama_folder, tmp_path / "cut", gates=tmp_path / "g")
    with pytest.raises(HeadpruneError, match="keep-full has no effect beside --gates"):
        headprune.convert_swa(llama_folder, tmp_path / "o", gates=tmp_path / "g", keep_full=0.5)
    assert from_pretrained(tmp_path / "out").config.headprune["window"]


def test_gates_of_removal_give_no_windows(llama_folder, text_file, tmp_path):
    headprune.train_gates(llama_folder, tmp_path / "g", data=text_file, target_heads=12, steps=1)
    with pytest.raises(HeadpruneError, match="remove heads: cut with 'headprune prune --gates'"):
        headprune.convert_swa(llama_folder, tmp_path / "out", gates=tmp_path / "g")
    assert not (tmp_path / "out").exists()
