"""Layers exchange heads: measured in the cut model, chosen within the same budgets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedModel

from headprune.config import (
    BudgetConfig,
    DataConfig,
    Dtype,
    Method,
    PlanConfig,
    ScoreConfig,
    TrainGatesConfig,
)
from headprune.data.samples import CalibrationSample
from headprune.declaration import Context
from headprune.errors import DataError, PlanError
from headprune.evidence.distance import distance, outputs, weight_of
from headprune.evidence.score import score
from headprune.exporting.prune import prune
from headprune.gates.train_gates import train_gates
from headprune.model.attention import attention_of
from headprune.model.batch import Batch
from headprune.model.gating import fixed, gated
from headprune.model.heads import read_output, write_output
from headprune.model.opening import load
from headprune.model.replay import Replay
from headprune.model.units import unit_gates, unit_sizes
from headprune.planning import exchange
from headprune.planning.allocation import BudgetLimit
from headprune.planning.budgets import parameter_prices
from headprune.planning.choice import HeadChoice
from headprune.planning.constraints import Constraints
from headprune.planning.exchange import Exchanges
from headprune.planning.from_evidence import CutRequest
from headprune.planning.plan import plan
from headprune.planning.rounds import text_of
from headprune.schemas.scores import read_scores
from headprune.surgery.refit import refit
from headprune.tensors.units import Unit
from tests import tiny
from tests.test_criteria import run
from tests.test_refit import sample_of

FAMILIES = tiny.present("llama-gqa", "gpt2", "bert-mlm", "t5", "marian", "albert", "bloom")


def batch_for(net: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A few sequences that a model reads."""
    ids = torch.randint(5, 40, (3, 12), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if net.config.is_encoder_decoder:
        batch |= {"decoder_input_ids": ids[:, :7], "labels": ids[:, 1:8]}
    return batch


@pytest.mark.parametrize("case", FAMILIES)
def test_a_pass_that_resumes_gives_what_a_whole_one_gives(case: str) -> None:
    net = tiny.model(case).eval()
    attentions, batch = attention_of(net), batch_for(net)
    replay = Replay(net, attentions)
    with torch.no_grad():
        with replay.recording():
            outputs(net, batch)
        for attention in attentions:
            heads, bias = read_output(attention)
            write_output(attention, heads * -2.0, bias)
            whole = outputs(net, batch).logits
            with replay.from_block_of(attention):
                resumed = outputs(net, batch).logits
            assert torch.equal(whole, resumed)
            write_output(attention, heads, bias)
        assert all("forward" not in vars(module) for module in net.modules())


def test_what_changed_before_a_pass_resumes_is_not_seen() -> None:
    net = tiny.model("gpt2").eval()
    first, *_, last = attentions = attention_of(net)
    batch, replay = batch_for(net), Replay(net, attentions)
    with torch.no_grad():
        with replay.recording():
            before = outputs(net, batch).logits
        heads, bias = read_output(first)
        write_output(first, heads * -2.0, bias)
        with replay.from_block_of(last):
            assert torch.equal(outputs(net, batch).logits, before)
        assert not torch.equal(outputs(net, batch).logits, before)


def work_on(
    net: PreTrainedModel,
    values: torch.Tensor,
    keep: int,
    least: int = 0,
    unit: Unit = Unit.HEAD,
    held: frozenset[int] = frozenset(),
) -> tuple[Exchanges, set[int], CalibrationSample]:
    """Exchanges of a model, what stays by scores, and the text."""
    generator = torch.Generator().manual_seed(1)
    taken = torch.randint(5, 40, (24, 24), generator=generator)
    text = sample_of(taken, taken[:0])
    budget = BudgetConfig(keep=keep, min_per_layer=least)
    choice = HeadChoice(attention_of(net), unit, budget, [], Constraints(net), held)
    kept = choice.of(values, set(range(len(values))), keep)
    return Exchanges(net, choice, values, text), kept, text


@pytest.mark.parametrize("dead", [0, 1])
def test_a_head_that_does_nothing_goes_for_one_that_does(dead: int) -> None:
    net = tiny.model("gpt2").eval()
    attentions = attention_of(net)[:2]
    count = attentions[0].query_heads
    heads, bias = read_output(attentions[dead])
    heads[0] = 0.0
    write_output(attentions[dead], heads * 4, bias)
    values = torch.arange(1.0, 1.0 + count * len(attention_of(net))).double()
    own = range(dead * count, (dead + 1) * count)
    values[own.start] = 100.0 if dead else 0.5  # the dead one stays, or goes
    values[own.start + 1 : own.stop] += 200.0
    if not dead:
        values[0], values[count] = 0.9, 0.1
    before = [read_output(a)[0] for a in attention_of(net)]
    work, kept, _ = work_on(net, values, keep=len(values) - 1)
    ((gone,),) = [set(range(len(values))) - kept]
    assert gone != own.start
    after, done = work.run(kept, 3)
    assert set(range(len(values))) - after == {own.start}
    assert done[0].taken and done[0].returned == 1
    assert all(
        torch.equal(read_output(a)[0], b) for a, b in zip(attention_of(net), before, strict=True)
    )


@pytest.mark.parametrize(
    ("case", "unit"),
    [
        *[(case, Unit.HEAD) for case in tiny.present("llama-gqa", "gpt2", "bert-mlm")],
        *[(case, Unit.KV_GROUP) for case in tiny.present("llama-gqa")],
    ],
)
def test_what_it_says_is_what_the_cut_model_does(case: str, unit: Unit) -> None:
    net = tiny.model(case).eval()
    attentions = attention_of(net)
    heads, total = sum(a.query_heads for a in attentions), len(unit_sizes(attentions, unit))
    values = torch.rand(total, generator=torch.Generator().manual_seed(3)).double()
    work, kept, text = work_on(net, values, keep=heads // 2, least=1, unit=unit)
    after, done = work.run(kept, 2)
    assert len(after) == len(kept) == total // 2
    (batch,) = [text.whole()]
    with torch.no_grad():
        wanted = outputs(net, batch)
    found = []
    for stays in (kept, after):
        gates = unit_gates(attentions, unit, stays)
        assert all(bool(gate.any()) for gate in gates)
        own = tiny.model(case).eval()
        refit(own, attention_of(own), gates, batch)
        with torch.no_grad(), gated(attention_of(own), fixed(gates)):
            found.append(float(distance(outputs(own, batch), wanted, batch)))
    assert done, "nothing was exchanged"
    assert found[0] == pytest.approx(done[0].before, rel=1e-4)
    taken = [each.after for each in done if each.taken] or [done[0].before]
    assert found[1] == pytest.approx(taken[-1], rel=1e-4)
    assert found[1] <= found[0]


def test_a_head_that_is_held_stays_whatever_it_does() -> None:
    stays = []
    for hold in (False, True):
        net = tiny.model("gpt2").eval()
        attentions = attention_of(net)
        dead = attentions[0].query_heads  # the first of the second layer, and the next to go there
        heads, bias = read_output(attentions[1])
        heads[0] = 0.0
        write_output(attentions[1], heads * 4, bias)
        values = torch.arange(1.0, 1.0 + sum(a.query_heads for a in attentions)).double()
        held = frozenset({dead} if hold else ())
        work, kept, _ = work_on(net, values, keep=len(values) - 1, held=held)
        assert kept == set(range(1, len(values)))
        stays.append(dead in work.run(kept, 3)[0])
    assert stays == [False, True]


def scored(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model and its scores in a folder, which becomes the working directory."""
    monkeypatch.chdir(folder)
    tiny.save(tiny.model("gpt2"), folder / "model")
    (folder / "text.txt").write_text(tiny.text(3_000))
    words = ["score", "model", "--data", "text.txt", "--criterion", "fisher", "--output", "s"]
    small = ["--calibration-tokens", 512, "--seq-len", 16]
    assert run(capsys, monkeypatch, *words, *small)[0] == 0


def test_a_plan_with_exchanges(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scored(tmp_path, capsys, monkeypatch)
    planned = ["plan", "model", "--scores", "s", "--keep", 0.5]
    plain, exchanged = (
        json.loads(run(capsys, monkeypatch, *planned, "--exchanges", times, "--json")[1])
        for times in (0, 3)
    )
    assert plain["exchanges"] is None and exchanged["exchanges"]
    taken = [each["after"] < each["before"] for each in exchanged["exchanges"]]
    assert any(taken) and (plain["plan"] != exchanged["plan"])
    status, said, _ = run(capsys, monkeypatch, *planned, "--exchanges", 3)
    assert status == 0 and said.count("Exchange ") == len(taken)


def test_exchanges_after_rounds_start_from_the_original(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scored(tmp_path, capsys, monkeypatch)
    rounds = ["plan", "model", "--scores", "s", "--keep", 0.5, "--rounds", 2, "--refit"]
    plain, exchanged = (
        json.loads(run(capsys, monkeypatch, *rounds, "--exchanges", times, "--json")[1])
        for times in (0, 2)
    )
    net, _ = load("model", Dtype.FLOAT32, Context().allowed)
    attentions = attention_of(net)
    keep = [own["keep"] for own in plain["plan"]["attentions"].values()]
    gates = [
        torch.zeros(a.query_heads).index_fill(0, torch.tensor(own), 1.0)
        for a, own in zip(attentions, keep, strict=True)
    ]
    batch = text_of(net, "model", read_scores(Path("s")), Context()).whole()
    with torch.no_grad():
        wanted = outputs(net, batch)
        refit(net, attentions, gates, batch)
        with gated(attentions, fixed(gates)):
            found = float(distance(outputs(net, batch), wanted, batch))
    assert exchanged["exchanges"][0]["before"] == pytest.approx(found, rel=1e-4)


@pytest.mark.parametrize("case", tiny.present("bert", "t5"))
def test_padded_rows_count_by_their_outputs(case: str) -> None:
    net = tiny.model(case).eval()
    total = sum(a.query_heads for a in attention_of(net))
    values = torch.rand(total, generator=torch.Generator().manual_seed(3)).double()
    ids = torch.randint(5, 40, (30, 24), generator=torch.Generator().manual_seed(1))
    lengths = [24 - 3 * (row % 5) for row in range(30)]

    def collate(rows: list[dict[str, list[int]]]) -> Batch:
        mask = torch.zeros(len(rows), 24, dtype=torch.long)
        for at, row in enumerate(rows):
            mask[at, : len(row["input_ids"])] = 1
        padded = [row["input_ids"] + [0] * (24 - len(row["input_ids"])) for row in rows]
        batch: Batch = {"input_ids": torch.tensor(padded), "attention_mask": mask}
        if net.config.is_encoder_decoder:
            batch["decoder_input_ids"] = batch["input_ids"]
            batch["labels"] = batch["input_ids"].masked_fill(mask == 0, -100)
        return batch

    cut = [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]
    rows = Dataset.from_dict({"input_ids": cut})
    budget = BudgetConfig(keep=total // 2)
    choice = HeadChoice(attention_of(net), Unit.HEAD, budget, [], Constraints(net))
    kept = choice.of(values, set(range(total)), total // 2)
    found = []
    for size in (1, 7):
        text = CalibrationSample(rows, collate, sum(lengths), batch_size=size)
        found.append(Exchanges(net, choice, values, text).run(kept, 2))
    assert found[0][0] == found[1][0] and found[0][1]
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert one.before == pytest.approx(other.before, rel=1e-4)
    apart = collate([rows[0], rows[4]]), collate([rows[0]])
    assert weight_of(net, apart[0]) != weight_of(net, apart[1])


def test_limits_are_kept_and_what_is_worth_more_comes_back() -> None:
    net = tiny.model("gpt2").eval()
    attentions = attention_of(net)
    count = attentions[0].query_heads
    heads, bias = read_output(attentions[1])
    heads[0] = 0.0
    write_output(attentions[1], heads * 4, bias)
    values = torch.arange(1.0, 1.0 + count * len(attentions)).double()
    values[count] = 100.0
    values[count + 1 : 2 * count] += 200.0
    prices = parameter_prices(net, attentions)
    most = prices.total([(a.query_heads, a.kv_heads) for a in attentions]) - 1
    limit = BudgetLimit(prices, most, "--max-params")
    budget = BudgetConfig(max_params=int(most))
    choice = HeadChoice(attentions, Unit.HEAD, budget, [limit], Constraints(net))
    kept = choice.of(values, set(range(len(values))), None)
    assert count in kept and len(kept) == len(values) - 1
    text = sample_of(torch.arange(576).reshape(24, 24) * 7 % 35 + 5, torch.zeros(0, 24).long())
    after, _ = Exchanges(net, choice, values, text).run(kept, 3)
    assert set(range(len(values))) - after == {count}


def test_the_originals_outputs_wait_beside_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[str]()

    def send(what: Any, device: torch.device | str) -> Any:
        sent.append(str(device))
        return what

    monkeypatch.setattr(exchange, "send_to_device", send)
    monkeypatch.setattr(exchange, "input_device", lambda net: "meta")
    net = tiny.model("gpt2").eval()
    total = sum(a.query_heads for a in attention_of(net))
    work, kept, _ = work_on(net, torch.arange(total).double(), keep=total - 2)
    assert sent and set(sent) == {"cpu"}  # once made
    batches = len(sent)
    work.run(kept, 1)
    assert sent.count("cpu") == batches and set(sent[batches:]) == {"meta"}  # every time used


def test_outputs_that_are_not_finite_are_told() -> None:
    net = tiny.model("gpt2").eval()
    total = sum(a.query_heads for a in attention_of(net))
    work, kept, _ = work_on(net, torch.arange(total).double(), keep=total - 2)
    with torch.no_grad():
        net.transformer.ln_f.weight.fill_(float("nan"))
    with pytest.raises(DataError, match="exchanges are measured on is not finite"):
        work.run(kept, 1)


@pytest.mark.parametrize(
    "asked", [{"per_layer": True}, {"tensor_parallel": 2}, {"targets": "anywhere"}]
)
def test_where_no_single_head_can_move_exchanges_are_refused(
    asked: dict[str, object], tmp_path: Path
) -> None:
    folder = tiny.save(tiny.model("gpt2"), tmp_path / "model")
    (tmp_path / "text.txt").write_text(tiny.text(3_000))
    data = DataConfig(source=str(tmp_path / "text.txt"))
    small = {"calibration_tokens": 512, "seq_len": 16, "criterion": ["fisher"]}
    score(folder, tmp_path / "s", ScoreConfig(**small), data)
    with pytest.raises(PlanError, match="--exchanges moves"):
        plan(folder, tmp_path / "s", PlanConfig(keep=0.5, exchanges=1, **asked))


def test_without_text_there_is_nothing_to_measure_on(tmp_path: Path) -> None:
    folder = tiny.save(tiny.model("gpt2"), tmp_path / "model")
    score(folder, tmp_path / "s", ScoreConfig(criterion=["magnitude"]))
    with pytest.raises(PlanError, match="--exchanges measures on the text"):
        plan(folder, tmp_path / "s", PlanConfig(keep=0.5, exchanges=1))


def test_where_nothing_is_gained_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scored(tmp_path, capsys, monkeypatch)
    planned = ["plan", "model", "--scores", "s", "--keep", 1.0, "--exchanges", 1]
    assert "No exchange between layers is worth it" in run(capsys, monkeypatch, *planned)[1]


def test_gates_are_trained_of_the_heads_that_a_plan_with_exchanges_keeps(tmp_path: Path) -> None:
    folder, text = tmp_path / "model", tmp_path / "text.txt"
    tiny.save(tiny.model("llama-mha"), folder)
    text.write_text(tiny.text(12_000))
    data = DataConfig(source=str(text))
    score(str(folder), tmp_path / "scores", ScoreConfig(seq_len=128), data)
    found = []
    for exchanges in (0, 3):
        config = PlanConfig(keep=8, exchanges=exchanges)
        made = plan(str(folder), tmp_path / "scores", config).plan
        gates = tmp_path / f"gates-{exchanges}"
        training = TrainGatesConfig(
            target_heads=8, method=Method.REFIT, exchanges=exchanges, steps=1, seq_len=32
        )
        said = list[str]()
        context = Context(line=lambda line, good=None, said=said: said.append(line))
        train_gates(str(folder), data, gates, training, context=context)
        assert any(line.startswith("Exchange 1: ") for line in said) is (exchanges > 0)
        request, cut = CutRequest(gates=gates), tmp_path / f"cut-{exchanges}"
        trained = prune(str(folder), cut, request).plan
        planned, kept = (
            [attention.keep for attention in each.attentions.values()] for each in (made, trained)
        )
        assert planned == kept
        found.append(kept)
    assert found[0] != found[1]
