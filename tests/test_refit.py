"""Refitting W_O: the identity where nothing goes, never worse, and proven on every layout."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from headprune.config import CalibrationConfig, DataConfig
from headprune.context import Context
from headprune.data.text import Sequences, Text
from headprune.errors import DataError, PlanError
from headprune.model.attention import attention_of
from headprune.model.heads import project_output, read_heads, read_output, write_heads
from headprune.planning.choose import CutRequest
from headprune.result.prune import prune
from headprune.result.refitting import judged_refit
from headprune.surgery import refit as refits
from headprune.surgery.cut import cut_heads, resolve
from headprune.surgery.edit import Edit
from headprune.surgery.refit import fit_output, refit
from headprune.tensors import least_squares
from headprune.tensors.least_squares import (
    Moments,
    best_ridge,
    held_out,
    removal_costs,
    ridge_fit,
    ridge_path,
)
from tests import tiny
from tests.cutting import uneven_plan
from tests.marks import slow_unless

LAYOUTS = tiny.present(
    *("llama-gqa", "gpt2", "bert-mlm", "falcon-new", "gpt_neox", "opt", "phi3", "marian", "t5"),
    *("bart", "deberta-v2", "modernbert", "qwen3", "bloom"),
)


@settings(max_examples=40, deadline=None)
@given(
    width=st.integers(1, 8),
    out=st.integers(1, 5),
    tokens=st.integers(1, 30),
    ridge=st.floats(1e-6, 10),
    centred=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_a_refit_never_raises_the_error(width, out, tokens, ridge, centred, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator)
    y = torch.randn(tokens, out, generator=generator) + 2.0
    start = torch.randn(out, width, generator=generator).double()
    moments = Moments.of(x, y)
    moments = moments.centred() if centred else moments
    (fitted,) = ridge_path(moments, start, [ridge])
    error = moments.error(start)
    assert moments.error(fitted) <= error * (1 + 1e-9) + 1e-9
    away = start - (fitted - start)  # as far the other way
    if float((fitted - start).abs().max()) > 1e-3:
        assert moments.error(away) > moments.error(fitted)
    if not centred:
        direct = (y.double() - x.double() @ fitted.T).square().sum()
        assert moments.error(fitted) == pytest.approx(float(direct), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("ridge", [math.inf, 1e-1, 1e-4])
def test_one_ridge_by_cholesky_is_that_of_the_path(ridge):
    x, y, start = torch.randn(50, 6), torch.randn(50, 3), torch.randn(3, 6).double()
    moments = Moments.of(x, y)
    (wanted,) = ridge_path(moments, start, [ridge])
    torch.testing.assert_close(ridge_fit(moments, start, ridge), wanted)
    if ridge < 1:
        off = ridge_fit(moments, start, 10 * ridge)
        assert not torch.allclose(off, wanted, rtol=1e-7, atol=1e-7)
        negative = replace(moments, inputs=moments.inputs - 0.9 * moments.inputs.diagonal().diag())
        assert ridge_fit(negative, start, ridge).isfinite().all()


def test_moments_of_columns_and_errors_per_output():
    x, y, weight = torch.randn(50, 6), torch.randn(50, 3), torch.randn(3, 2).double()
    errors = Moments.of(x, y).of_columns([4, 1]).errors(weight)
    direct = (y.double() - x[:, [4, 1]].double() @ weight.T).square().sum(0)
    torch.testing.assert_close(errors, direct, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(Moments.of(x, y).of_columns([1, 4]).errors(weight), direct, rtol=1e-3)


def test_moments_of_shards_add_up():
    x, y = torch.randn(20, 4), torch.randn(20, 3)
    whole, parts = Moments.of(x, y), Moments.of(x[:7], y[:7]) + Moments.of(x[7:], y[7:])
    torch.testing.assert_close(whole.inputs, parts.inputs)
    torch.testing.assert_close(whole.cross, parts.cross)
    assert whole.error(torch.ones(3, 4).double()) == pytest.approx(
        parts.error(torch.ones(3, 4).double())
    )


def test_other_tokens_choose_the_ridge():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(40, n, generator=generator) for n in (20, 3))  # y has nothing to do with x
    start, ridges = torch.zeros(3, 20).double(), [math.inf, 1e0, 1e-6]
    fitted, judged = Moments.of(x[:30], y[:30]), Moments.of(x[30:], y[30:])
    assert best_ridge(fitted, judged, start, ridges) == math.inf
    assert judged.error(start) == pytest.approx(float(y[30:].square().sum()))
    assert best_ridge(fitted, fitted, start, ridges) == 1e-6  # judged by what it has seen
    assert held_out(17).nonzero().flatten().tolist() == [7, 15]
    assert held_out(3).tolist() == [False, False, True]


@pytest.mark.parametrize("rounded", [torch.float32, torch.bfloat16])
def test_products_in_float32_serve_as_well(rounded, monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(300, 12) @ torch.randn(12, 12)  # directions of unequal strength
    x = x + 300 * torch.randn(12)  # and large means
    y, start = x @ torch.randn(12, 5) + torch.randn(300, 5), torch.zeros(5, 12).double()
    monkeypatch.setattr(least_squares, "_ROWS", 64)
    (exact,) = ridge_path(Moments.of(x, y).centred(), start, [1e-4])
    monkeypatch.setattr(least_squares, "product_dtype", lambda device: rounded)
    (found,) = ridge_path(Moments.of(x, y).centred(), start, [1e-4])
    gap = float((found - exact).abs().max() / exact.abs().max())
    assert (gap < 1e-4) == (rounded is torch.float32)


def test_the_cost_of_the_first_removal_is_that_of_least_squares(monkeypatch):
    torch.manual_seed(0)
    x, weight = torch.randn(200, 6).double(), torch.randn(4, 6).double()
    x[:, 2:4] = x[:, :2] + 0.3 * x[:, 2:4]  # the first two blocks say nearly the same
    blocks = [[0, 1], [2, 3], [4, 5]]
    monkeypatch.setattr(least_squares, "REMOVAL_RIDGE", 1e-12)
    costs = removal_costs(x.T @ x, weight, blocks)
    direct = []
    for block in blocks:
        rest = [c for c in range(6) if c not in block]
        wanted = x @ weight.T
        fitted = torch.linalg.lstsq(x[:, rest], wanted).solution
        direct.append(float((wanted - x[:, rest] @ fitted).square().sum()))
    cheapest = min(range(3), key=direct.__getitem__)
    assert costs[cheapest] == pytest.approx(direct[cheapest], rel=1e-6)
    assert min(costs) == costs[cheapest]
    first, second = direct[0], direct[1]
    assert max(first, second) < min(costs[1 - cheapest], direct[2])  # one may go, not both


def _solved_anew(gram, weight, blocks, ridge):
    """The costs of removals, every block that is left fitted from the first weights each time."""
    scale, power = ridge * gram.diagonal().mean(), float((weight @ gram * weight).sum())

    def lost(left):  # the least |W x - V x_kept|^2 + scale |V - W_kept|^2
        kept = [column for b in left for column in blocks[b]]
        part = weight @ gram[:, kept] + scale * weight[:, kept]
        ridged = gram[kept][:, kept] + scale * torch.eye(len(kept)).double()
        explained = float((torch.linalg.solve(ridged, part.T).T * part).sum())
        return power + float(scale * weight[:, kept].square().sum()) - explained

    left, costs, highest, before = list(range(len(blocks))), [0.0] * len(blocks), 0.0, 0.0
    while left:
        without = {b: lost([other for other in left if other != b]) - before for b in left}
        gone = min(left, key=without.__getitem__)
        highest = max(highest, without[gone])
        costs[gone], before = highest, before + without[gone]
        left.remove(gone)
    return costs


@pytest.mark.parametrize("downdated", [True, False])
def test_removals_cost_what_they_do_when_every_fit_is_made_anew(downdated, monkeypatch):
    torch.manual_seed(3)
    x, weight = torch.randn(80, 12).double() @ torch.randn(12, 12).double(), torch.randn(5, 12)
    blocks = [[3, 7, 0], [1], [2, 10], [11, 4, 5, 6], [8, 9]]
    if not downdated:  # the rest keeps what it had to do with the block
        monkeypatch.setattr(torch.Tensor, "addmm_", lambda rest, *others, **factors: rest)
    costs = removal_costs(x.T @ x, weight, blocks)
    wanted = _solved_anew(x.T @ x, weight.double(), blocks, ridge=1e-2)
    assert (costs == pytest.approx(wanted, rel=1e-9)) == downdated


@pytest.mark.parametrize("case", slow_unless(tiny.one_per_layout(LAYOUTS).__contains__, LAYOUTS))
def test_refit_on_every_layout(case, tmp_path):
    model = tiny.model(case)
    plan = uneven_plan(model)
    folder = tiny.save(model, tmp_path / "model")
    rows = [f"{tiny.text(20, i)}\t{tiny.text(17, i)}" for i in range(24)]
    (tmp_path / "pairs.tsv").write_text("\n".join(["a\tb", *rows]))
    (tmp_path / "text.txt").write_text(tiny.text(1200))
    data = DataConfig(source=str(tmp_path / "text.txt"))
    if model.config.is_encoder_decoder:
        data = DataConfig(source=str(tmp_path / "pairs.tsv"), text_column="a,b")
    small = CalibrationConfig(calibration_tokens=600, seq_len=16)
    plan = plan.model_copy(update={"model": None})
    done = prune(folder, tmp_path / "out", CutRequest(plan=plan), refit=data, calibration=small)
    record = done.manifest.refit
    assert record.error_after < record.error_before
    assert "refitted" in str(done.manifest.changed_weights)


@pytest.mark.parametrize("case", tiny.present("llama-gqa", "gpt2"))
def test_nothing_removed_is_the_identity(case):
    model = tiny.model(case)
    attentions = attention_of(model)
    before = [read_output(a)[0] for a in attentions]
    ids = torch.randint(5, 60, (64, 12), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    whole = [torch.ones(a.query_heads) for a in attentions]
    refit(model, attentions, whole, batch)
    for attention, old in zip(attentions, before, strict=True):
        torch.testing.assert_close(read_output(attention)[0], old, rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", tiny.present("llama-gqa", "gpt2"))
def test_a_twin_makes_up_for_its_twin(case):
    model = tiny.model(case)
    attentions = attention_of(model)
    heads = read_heads(attentions[0])
    for role in ("q", "k", "v"):
        for tensor in (getattr(heads, role), getattr(heads, f"{role}_bias")):
            if tensor is not None and (role == "q" or len(tensor) == len(heads.q)):
                tensor[1] = tensor[0]
    write_heads(attentions[0], heads)
    ids = torch.randint(5, 60, (64, 12), generator=torch.Generator().manual_seed(0))
    gone = [torch.ones(a.query_heads) for a in attentions]
    gone[0][0] = 0.0
    first, *others = refit(model, attentions, gone, {"input_ids": ids})
    assert first.before > 1e-2
    assert first.after < 1e-6
    new = read_output(attentions[0])[0]
    torch.testing.assert_close(new[1], heads.o[0] + heads.o[1], rtol=1e-2, atol=1e-3)
    assert not torch.allclose(new[1], heads.o[1], rtol=1e-2, atol=1e-3)
    assert all(r.after <= r.before * (1 + 1e-9) for r in others)


def test_what_cannot_be_refitted_is_said():
    model = tiny.model("gpt2")
    attentions = attention_of(model)
    gates = [torch.ones(a.query_heads) for a in attentions]
    gates[0][0] = 0.0
    ids = torch.randint(5, 60, (4, 12))
    with pytest.raises(DataError, match="two sequences"):
        refit(model, attentions, gates, {"input_ids": ids[:1]})
    width = attentions[1].query_heads * read_output(attentions[1])[0].shape[-1]
    enough = torch.randint(5, 60, (4, width // 4))
    said = f"h.1.attn' is singular: {width} columns, and the text has {width - 4} tokens"
    with pytest.raises(DataError, match=said):
        refit(model, attentions, gates, {"input_ids": enough[:, :-1]})
    assert refit(model, attentions, gates, {"input_ids": enough})
    with torch.no_grad():
        model.transformer.wte.weight[ids[0, 0]] = float("nan")
    with pytest.raises(DataError, match="output projection of 'transformer.h.0.attn'"):
        refit(model, attentions, gates, {"input_ids": ids})
    albert = tiny.model("albert")
    modules = attention_of(albert)
    gates = [torch.ones(a.query_heads) for a in modules]
    with pytest.raises(PlanError, match="runs in more than one layer"):
        refit(albert, modules, gates, {"input_ids": ids})


def text_of(taken, left):
    """Sequences to fit to, and others of the same text."""

    def collate(rows):
        ids = torch.tensor([row["input_ids"] for row in rows])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    some = left[: 2 * max(1, len(taken) // 8)].tolist()
    parts = (taken.tolist(), some[::2], some[1::2])
    return Text(*(Sequences(Dataset.from_dict({"input_ids": ids}), collate) for ids in parts))


@pytest.mark.parametrize("case", ["llama-gqa", "bert"])
def test_a_refit_that_makes_other_text_worse_is_left_out(case):
    found = {}
    for same in (True, False):
        model = tiny.model(case)
        edit = Edit(uneven_plan(model))
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        generator = torch.Generator().manual_seed(0)
        taken = torch.randint(5, 60, (32, 24), generator=generator)
        left = taken.clone()
        if not same:  # a fit to few tokens says nothing of the others
            taken = taken % 2 + 7
            left = left % 40 + 20
        judged = judged_refit(model, edit, text_of(taken, left), "text", 0, Context())
        assert judged.worth is not None
        assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
        changed = any(not torch.equal(before[name], new) for name, new in judged.tensors.items())
        found[same] = changed, judged.taken is not None, bool(judged.warnings)
        assert (judged.worth.refitted <= judged.worth.without) == changed
    assert found == {True: (True, True, False), False: (False, False, True)}


@pytest.mark.parametrize("helps", [True, False])
def test_what_a_refit_is_worth_is_told_by_sequences_that_did_not_take_it(helps, monkeypatch):
    """Those that choose say the opposite of those that report."""
    calls = itertools.count()

    def distance(*_):
        batch, refitted = divmod(next(calls), 2)
        return 0.5 if not refitted else 0.1 if helps == (batch < 2) else 0.9

    monkeypatch.setattr("headprune.result.refitting._distance", distance)
    generator = torch.Generator().manual_seed(0)
    taken, left = (torch.randint(5, 60, (16, 24), generator=generator) for _ in range(2))
    model = tiny.model("llama-gqa")
    edit = Edit(uneven_plan(model))
    judged = judged_refit(model, edit, text_of(taken, left), "text", 0, Context())
    assert (judged.taken is not None) == helps and judged.worth is not None
    assert judged.worth.refitted == 0.9  # what was taken is told by the others, or why it was not
    assert judged.worth.tokens == 2 * 24  # of four sequences, two


def test_a_refit_with_outputs_that_are_not_finite_is_refused():
    generator = torch.Generator().manual_seed(0)
    taken, left = (torch.randint(5, 60, (40, 24), generator=generator) for _ in range(2))
    model = tiny.model("llama-gqa")
    edit = Edit(uneven_plan(model))
    with torch.no_grad():
        model.model.embed_tokens.weight[63] = float("nan")
    with pytest.raises(DataError, match="on held-out sequences are not finite"):
        judged_refit(model, edit, text_of(taken, left * 0 + 63), "text", 0, Context())


@pytest.mark.parametrize("case", ["llama-gqa", "bert-mlm"])
def test_a_model_with_a_layer_without_heads_is_refitted_again(case):
    generator = torch.Generator().manual_seed(0)
    taken, left = (torch.randint(5, 60, (40, 24), generator=generator) for _ in range(2))
    model = tiny.model(case)
    cut_heads(model, resolve(uneven_plan(model, 1), model, ragged=True))
    edit = Edit(uneven_plan(model))
    heads = [cut.attention.query_heads for cut in edit.cuts(model)]
    judged = judged_refit(model, edit, text_of(taken, left), "text", 0, Context())
    assert judged.taken.modules == sum(count > 0 for count in heads) < len(heads)
    assert judged.taken.error_after < judged.taken.error_before


@pytest.mark.parametrize("case", ["llama-gqa", "gpt2", "bert-mlm"])
def test_moments_are_taken_of_a_few_sequences_at_a_time(case, monkeypatch):
    ids = torch.randint(5, 60, (40, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[3::5, 9:] = 0
    seen = []
    taken = Moments.of

    def counted(x, y):
        seen.append(len(x))
        return taken(x, y)

    def refitted(tokens, rows):
        monkeypatch.setattr("headprune.surgery.refit._TOKENS", tokens)
        model = tiny.model(case)
        attentions = attention_of(model)
        gates = [torch.ones(a.query_heads) for a in attentions]
        gates[0][0] = gates[-1][1] = 0.0
        seen.clear()
        refit(model, attentions, gates, {"input_ids": ids[rows], "attention_mask": mask[rows]})
        return [read_output(a)[0] for a in attentions]

    monkeypatch.setattr(Moments, "of", counted)
    every = torch.arange(40)
    split = refitted(36, every)
    assert max(seen) == 36
    whole = refitted(10**6, every)
    assert max(seen) > 300
    for found, wanted in zip(split, whole, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    other = refitted(36, every.roll(1))  # others are held out
    assert not all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(other, whole, strict=True)
    )


@pytest.mark.parametrize("case", ["gpt2", "llama-gqa"])
def test_half_of_the_goal_is_what_the_uncut_layer_makes_of_the_cut_stream(case, monkeypatch):
    ids = torch.randint(5, 60, (60, 12), generator=torch.Generator().manual_seed(0))
    model = tiny.model(case)
    attentions = attention_of(model)
    given = []
    hook = attentions[1].output_projection.register_forward_hook(lambda m, x, y: given.append(y))
    with torch.no_grad():
        model(input_ids=ids)
    hook.remove()
    goals = {}

    def keep(attention, gate, states, goal, text):
        goals[attention.path] = goal, project_output(attention, states)
        return fit_output(attention, gate, states, goal, text)

    monkeypatch.setattr(refits, "fit_output", keep)
    gates = [torch.ones(a.query_heads) for a in attentions]
    gates[0][1:] = 0.0
    refit(model, attentions, gates, {"input_ids": ids})
    goal, own = goals[attentions[1].path]
    torch.testing.assert_close(goal, (given[0] + own) / 2, rtol=1e-4, atol=1e-5)
    for alone in (given[0], own):
        assert not torch.allclose(goal, alone, rtol=1e-3, atol=1e-4)
