"""Roles: planted heads are told and spoilt ones are not; batches do not count; bad input."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from transformers import GPT2LMHeadModel, PreTrainedModel

from headprune.config import CheckConfig, DataConfig, RolesConfig
from headprune.console.roles import roles as show
from headprune.errors import DataError, FamilyError
from headprune.evidence.losses import losses_without
from headprune.exporting.prune import prune
from headprune.model.attention import attention_of, layer_of
from headprune.model.batch import token_mask
from headprune.model.heads import read_output, write_output
from headprune.model.passes import run_model
from headprune.planning.from_evidence import CutRequest
from headprune.regression.limits import parse_limit
from headprune.regression.roles import LostRoles
from headprune.role import ROLES, sets
from headprune.role.ablation import Out, recorded, replayed, rises
from headprune.role.against import changes
from headprune.role.collection import Watched, watch
from headprune.role.contribution import Contributions
from headprune.role.effects import head_means
from headprune.role.inputs import Input, repeated_inputs, token_classes
from headprune.role.labels import _scored
from headprune.role.roles import roles
from headprune.schemas.plan import AttentionPlan, Plan
from headprune.schemas.roles import RolesRecord
from headprune.tensors.units import Unit
from tests import planted, tiny
from tests.marks import slow_unless
from tests.test_cli import run

SMALL = RolesConfig(sequences=8, seq_len=60, resamples=200)
PERIOD = 30  # two runs of 30 fit into the 64 places of the planted model, and into its 60 words


def whole() -> GPT2LMHeadModel:
    """Heads 0.0 to 0.2 and 1.0 do something."""
    model = planted.gpt2()
    planted.offset(model, 0, 0, by=1)
    planted.copies(model, 0)
    planted.offset(model, 0, 1, by=3)
    planted.duplicate(model, 0, 2)
    planted.induction(model, 0)
    return model


def measured(model: PreTrainedModel, folder: Path, **settings: object) -> RolesRecord:
    text = folder / "text.txt"
    text.write_text(tiny.text(1500))
    place = tiny.save(model, folder / "model")
    data = DataConfig(source=str(text))
    config = SMALL.model_copy(update=settings)
    with patch("headprune.role.roles.save"):  # the command draws, in tests of it
        return roles(str(place), folder / "roles", data, config, overwrite=True)


def told(record: RolesRecord) -> dict[str, str | None]:
    return {
        f"{layer}.{head.head}": head.role
        for layer, module in enumerate(record.modules)
        for head in module.heads
    }


def test_planted_heads_are_told(tmp_path: Path) -> None:
    record = measured(whole(), tmp_path)
    nothing = dict.fromkeys(("0.3", "1.1", "1.2", "1.3"))
    assert told(record) == {
        **{"0.0": "previous-token", "0.1": "positional", "0.2": "duplicate-token"},
        **{"1.0": "induction"},
        **nothing,
    }
    first, second = (module.heads for module in record.modules)
    assert first[0].scores["previous-token"].score == pytest.approx(1, abs=1e-3)
    assert first[1].scores["positional"].variant == "-3"
    # the first token, which has none before it, is copied to its own place: a second match
    exact = (first[2], "duplicate-token", 1.0), (second[0], "induction", 1 - 0.5 / PERIOD)
    for head, role, score in exact:
        found = head.scores[role]
        assert found.score == pytest.approx(score, abs=1e-3)
        assert found.control == pytest.approx(0, abs=0.1)
    assert "next-token" not in first[0].scores  # attention is causal


@pytest.mark.parametrize(
    ("place", "spoil"),
    [
        ("0.0", lambda model: planted.shuffled(model, 0, 0)),
        ("0.1", lambda model: planted.shuffled(model, 0, 1)),
        ("0.2", lambda model: planted.shuffled(model, 0, 2)),
        ("1.0", lambda model: planted.shuffled(model, 1, 0)),
        # the copy is one token late, so that the head looks at the wrong place
        ("1.0", lambda model: planted.offset(model, 0, 0, by=2)),
    ],
)
def test_spoilt_heads_are_not(
    place: str, spoil: Callable[[GPT2LMHeadModel], None], tmp_path: Path
) -> None:
    model = whole()
    before = told(measured(model, tmp_path))[place]
    spoil(model)
    assert told(measured(model, tmp_path))[place] != before
    assert before is not None


@pytest.mark.parametrize(("by", "over"), [(0, True), (7, False)])
def test_a_head_that_writes_what_it_reads_copies(by: int, over: bool, tmp_path: Path) -> None:
    model = whole()
    planted.writes(model, 1, 0, by=by)  # by as many ids further on: another token
    found = measured(model, tmp_path)
    score = found.modules[1].heads[0].scores["copying"]
    assert (score.score > 0.95) == over
    assert ("copying" in found.modules[1].heads[0].attributes) == over
    assert found.modules[1].heads[1].scores["copying"].score == pytest.approx(1 / PERIOD)
    assert "copying" not in measured(tiny.model("bert-mlm"), tmp_path).modules[0].heads[0].scores


@pytest.mark.parametrize("case", tiny.present("llama-gqa", "bert-mlm", "t5"))
def test_a_contribution_is_the_norm_of_what_one_head_writes(case: str) -> None:
    model, batches = _losing(case)
    attentions = attention_of(model)
    given, text = Input(batches), {"broad": ROLES["broad"]}
    norms = Contributions(model, attentions)
    watch(model, attentions, given, text, {}, beside=norms)
    position = len(attentions) - 1
    attention, found = attentions[position], norms.found(position)
    written: list[torch.Tensor] = []
    residual: list[torch.Tensor] = []
    with torch.no_grad():  # the others are silent
        weight, bias = read_output(attention)
        alone = torch.zeros_like(weight)
        alone[1] = weight[1]
        nothing = None if bias is None else torch.zeros_like(bias)
        write_output(attention, alone, nothing)
    layer = model.get_submodule(layer_of(attention.path))
    attention.output_projection.register_forward_hook(lambda m, a, o: written.append(o))
    layer.register_forward_pre_hook(lambda m, a: residual.append(a[0]))
    shares = []
    with torch.no_grad():
        for batch in batches:
            run_model(model, batch)
            share = written[-1].norm(dim=-1) / residual[-1].norm(dim=-1)
            shares.append(share[token_mask(batch, attention.kind)])
    expected = float(torch.cat(shares).mean())
    assert found[1] == pytest.approx(expected, rel=1e-4)
    assert found[2] != pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("by", "role"), [(PERIOD - 1, "induction"), (PERIOD, "duplicate-token")])
def test_a_head_that_looks_back_as_far_as_the_run_is_long_fails_its_control(
    by: int, role: str, tmp_path: Path
) -> None:
    model = planted.gpt2()
    planted.offset(model, 0, 0, by=by)
    head = measured(model, tmp_path).modules[0].heads[0]
    assert head.scores[role].low > ROLES[role].line
    assert head.scores[role].control == pytest.approx(1, abs=1e-3)
    assert (head.role, head.scores[role].state) == (None, "under")


@pytest.mark.parametrize("case", tiny.present("llama-gqa", "gpt2", "bert-mlm", "gpt_neox", "opt"))
def test_a_random_model_has_no_roles(case: str, tmp_path: Path) -> None:
    assert {*told(measured(tiny.model(case), tmp_path)).values()} == {None}


def _watched(model: PreTrainedModel, rows: list[torch.Tensor], size: int, pad: int) -> Watched:
    """Reads rows in batches, padded on the right and with ``pad`` more tokens."""
    batches = []
    for start in range(0, len(rows), size):
        some = rows[start : start + size]
        longest = max(map(len, some)) + pad
        ids = torch.stack(
            [torch.nn.functional.pad(r, (0, longest - len(r)), value=1) for r in some]
        )
        batch = {"input_ids": ids, "attention_mask": (ids != 1).long()}
        if model.config.is_encoder_decoder:  # which knows padding by what is not scored
            labels = torch.where(ids == 1, -100, ids)
            batch.update(decoder_input_ids=ids, labels=labels)
        batches.append(batch)
    on_text = {name: role for name, role in ROLES.items() if role.on == "text"}
    return watch(
        model, attention_of(model), Input(batches), on_text, token_classes(tiny.tokenizer())
    )


@pytest.mark.parametrize(
    "case", tiny.present("llama-gqa", "bert-mlm", "t5", "deberta-v2", "falcon")
)
def test_neither_batch_nor_padding_counts(case: str) -> None:
    model = tiny.model(case)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, 60, (n,), generator=generator) for n in (12, 20, 17)]
    alone = _watched(model, rows, 1, 0)
    together = _watched(model, rows, 3, 2)
    other = _watched(model, [rows[0].flip(0), *rows[1:]], 3, 2)
    differs = False
    for key, (sums, counts) in alone.found.items():
        assert torch.equal(counts, together.found[key][1])
        torch.testing.assert_close(sums, together.found[key][0], atol=1e-4, rtol=1e-4)
        differs |= not torch.allclose(sums, other.found[key][0], atol=1e-4, rtol=1e-4)
    for key, (sums, _) in alone.controls.items():
        torch.testing.assert_close(sums, together.controls[key][0])
    assert differs  # another text would show


def _losing(case: str) -> tuple[PreTrainedModel, list[Any]]:
    """A model and two batches with labels; the second is padded."""
    model, generator = tiny.model(case), torch.Generator().manual_seed(0)
    batches = []
    for padded in (0, 3):
        ids = torch.randint(5, 60, (2, 12), generator=generator)
        ids[1, 12 - padded :] = 1
        labels = torch.where(ids == 1, -100, ids)
        batch = {"input_ids": ids, "attention_mask": (ids != 1).long(), "labels": labels}
        if model.config.is_encoder_decoder:
            batch["decoder_input_ids"] = ids
        batches.append(batch)
    return model, batches


@pytest.mark.parametrize(
    "case",
    slow_unless(
        {"llama-gqa", "albert", "t5"}.__contains__,
        tiny.present("llama-gqa", "gpt2", "bert-mlm", "albert", "t5", "falcon"),
    ),
)
def test_the_loss_without_heads_is_that_of_the_whole_model_run_again(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batches = _losing(case)
    attentions = attention_of(model)
    means = head_means(model, attentions, batches)
    heads = [(i, h) for i, a in enumerate(attentions) for h in range(a.query_heads)]
    alone = [(Out(i, (h,), by_mean),) for by_mean in (False, True) for i, h in heads]
    last = len(attentions) - 1
    together = [(Out(0, (0,), True), Out(last, places, True)) for places in ((0,), (1, 2))]
    found = rises(model, attentions, batches, means, [*alone, *together])
    units = [[(head,) for head in range(a.query_heads)] for a in attentions]
    expected = torch.cat(losses_without(model, attentions, units, batches))
    zeroed = torch.stack([found[one].mean() for one in alone[: len(heads)]])
    torch.testing.assert_close(zeroed, expected, atol=1e-5, rtol=0)
    assert not torch.allclose(zeroed, expected.flip(0), atol=1e-5, rtol=0)
    # nothing is kept of the run before
    monkeypatch.setattr("headprune.role.ablation.replayed", lambda outputs: nullcontext())
    again = rises(model, attentions, batches, means, [*alone, *together])
    for one, rise in found.items():
        torch.testing.assert_close(rise, again[one], atol=1e-6, rtol=0)


def test_outputs_of_another_ablation_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers behind the first that differs are run again: what they returned is stale."""
    model, batches = _losing("llama-gqa")
    attentions = attention_of(model)
    means = head_means(model, attentions, batches)
    asked = [(Out(0, (0,), True), Out(2, (head,), True)) for head in (0, 1)]
    found = rises(model, attentions, batches, means, asked)

    def too_much(outputs: Any) -> Any:
        return replayed([*outputs, *stale[len(outputs) : -1]])

    with recorded(model.model.layers) as stale:
        run_model(model, batches[0])
    monkeypatch.setattr("headprune.role.ablation.replayed", too_much)
    spoilt = rises(model, attentions, batches[:1], means, asked)
    assert not torch.allclose(spoilt[asked[1]], found[asked[1]][:2], atol=1e-5)


def test_layers_run_as_often_as_something_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs per head from its layer on, and sets of heads from where they first differ."""
    model, batches = _losing("llama-gqa")
    attentions, layers = attention_of(model), model.model.layers
    means, runs = head_means(model, attentions, batches), []
    for layer in layers:
        layer.mlp.register_forward_hook(lambda *_: runs.append(1))
    alone = [(Out(i, (h,), m),) for i in range(4) for h in range(6) for m in (False, True)]
    rises(model, attentions, batches[:1], means, alone)
    assert len(runs) == 4 + 2 * 6 * (4 + 3 + 2 + 1)
    runs.clear()
    drawn = [(Out(0, (0,), True), Out(2, (head,), True)) for head in (0, 1, 1, 0)]
    rises(model, attentions, batches[:1], means, drawn)
    assert len(runs) == 4 + 4 + 2


def test_a_head_that_says_the_same_of_everything_is_its_mean() -> None:
    model, batches = _losing("llama-mha")
    attentions = attention_of(model)
    with torch.no_grad():  # the values of its first head are what its bias says
        attentions[1].module.v_proj.weight[: attentions[1].head_dim] = 0
    means = head_means(model, attentions, batches)
    asked = [(Out(1, (0,), True),), (Out(1, (0,), False),), (Out(1, (1,), True),)]
    own, zero, other = rises(model, attentions, batches, means, asked).values()
    assert own.mean() == pytest.approx(0, abs=1e-5)
    assert abs(zero.mean()) > 1e-3
    assert abs(other.mean()) > 1e-4


def test_effects_are_written_beside_roles(tmp_path: Path) -> None:
    model = whole()
    planted.writes(model, 1, 0)
    record = measured(model, tmp_path, ablation_tokens=120)
    heads = [head for module in record.modules for head in module.heads]
    assert all(head.effect is not None for head in heads)
    idle = record.modules[1].heads[1].effect  # writes nothing
    assert idle is not None
    assert idle.zero.nats == idle.mean.nats == pytest.approx(0, abs=1e-6)
    console = Console(width=60, record=True, file=io.StringIO())
    show(console, record, tmp_path)
    printed = console.export_text()
    assert "The 6 heads that the loss needs most" in printed
    assert "All heads of a role at once" in printed
    # a set of one head does what the head does
    alone, together = record.modules[1].heads[0].effect, record.sets["induction"]
    assert alone is not None
    assert together.heads == 1
    assert together.rise == alone.mean != alone.zero
    assert len(together.random) == 20
    assert max(together.random) == pytest.approx(0, abs=1e-6)  # the others of its layer are idle


def test_random_sets_have_as_many_heads_of_the_same_layers() -> None:
    attentions = attention_of(tiny.model("llama-gqa"))
    asked = {0: [1, 2], 2: [0, 1, 2, 3]}
    drawn = sets._drawn(attentions, asked, seed=0)
    assert len(drawn) == 20
    for heads in drawn:
        assert {p: len(set(places)) for p, places in heads.items()} == {0: 2, 2: 4}
        assert not set(heads[0]) & {1, 2}
        assert {4, 5} < set(heads[2])  # the set's own, where others run out
    assert len({str(heads) for heads in drawn}) > 5
    assert sets._drawn(attentions, {0: [*range(6)]}, seed=0) == []


def test_a_model_without_a_loss_has_no_effects(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--ablation-tokens needs the loss .* this is a BertModel"):
        measured(tiny.model("bert-base"), tmp_path, ablation_tokens=120)


SMALLER = ["--sequences", "8", "--seq-len", "60", "--resamples", "200", "--json"]


@pytest.fixture
def text_and_model(tmp_path: Path) -> tuple[Path, Path]:
    text = tmp_path / "text.txt"
    text.write_text(tiny.text(1500))
    return text, tiny.save(whole(), tmp_path / "original")


def test_what_a_cut_loses_is_said_in_the_numbers_of_the_original(
    text_and_model: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, original = text_and_model
    parts = {
        a.path: AttentionPlan(query_heads=4, kv_heads=4, keep=keep)
        for a, keep in zip(attention_of(whole()), ((2, 3), (0, 1, 2)), strict=True)
    }
    cut = prune(
        original, tmp_path / "cut", CutRequest(plan=Plan(unit=Unit.HEAD, attentions=parts))
    ).output
    arguments = ["--data", text, "--against", original, *SMALLER, "--output"]
    code, out, _ = run(capsys, "roles", cut, *arguments, tmp_path / "roles")
    record = RolesRecord.model_validate_json(out)
    assert code == 0
    assert [[head.head for head in m.heads] for m in record.modules] == [[2, 3], [0, 1, 2]]
    assert record.modules[0].heads[0].role == "duplicate-token"
    found = {
        name: ([h.head for h in c.kept], [h.head for h in c.lost], c.is_lost)
        for name, c in record.changes.items()
    }
    assert found["previous-token"] == ([], [0], True)
    assert found["positional"] == ([], [0, 1], True)
    assert found["induction"] == ([], [0], True)  # still there, with nothing to match
    assert found["duplicate-token"] == ([2], [], False)
    # the other way round nothing is lost, and what was gone is new
    back = changes(record.modules, measured(whole(), tmp_path).modules)
    assert [h.head for h in back["induction"].moved] == [0]
    assert not any(change.lost for name, change in back.items() if not ROLES[name].attribute)


def test_against_itself_nothing_is_lost_or_moved(
    text_and_model: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, original = text_and_model
    arguments = ["--data", text, "--against", original, *SMALLER, "--output", tmp_path / "roles"]
    _, out, _ = run(capsys, "roles", original, *arguments)
    record = RolesRecord.model_validate_json(out)
    assert record == RolesRecord.model_validate_json((tmp_path / "roles/roles.json").read_text())
    assert record.original == record.modules
    drawn = {file.name for file in (tmp_path / "roles").iterdir()}
    assert drawn == {"roles.json", "roles.svg", "roles.png", "scores.svg", "scores.png"}
    assert len(record.changes["induction"].kept) == 1
    for change in record.changes.values():
        assert not (change.lost or change.moved or change.is_lost)


def test_the_table_fits_a_narrow_terminal(tmp_path: Path) -> None:
    record = measured(whole(), tmp_path)
    changed = record.model_copy(
        update={
            "against": record.model,
            "changes": changes(record.modules, record.modules[:1]),
        }
    )
    console = Console(width=60, record=True, file=io.StringIO())
    show(console, changed, tmp_path)
    printed = console.export_text()
    assert "PO=b" in printed
    assert "Ibbb" in printed
    assert "induction lost: 1.0" in printed
    assert max(map(len, printed.splitlines())) <= 60


def test_the_best_of_many_offsets_is_judged_on_sequences_that_did_not_choose_it() -> None:
    """All offsets score one half: no more heads are surely above that than the level says."""
    heads, generator = 200, torch.Generator().manual_seed(0)
    counts = torch.full((32, 16), 100.0)
    sums = 50 + 10 * torch.randn(32, heads, 16, generator=generator)
    config = RolesConfig(resamples=200)
    found = [_scored(ROLES["positional"], (sums, counts), None, n, config) for n in range(heads)]
    lows = [score.low for score in found if score is not None]
    assert len(lows) == heads
    assert sum(low > 0.5 for low in lows) <= 12  # 5 expected; some 60 by sequences that choose


@pytest.mark.parametrize(
    ("arguments", "words", "said"),
    [
        (["--seq-len", "60"], 20, "makes 0 sequences"),
        (["--seq-len", "60"], 80, "an interval needs four"),
        (["--seq-len", "8", "--sequences", "4"], 500, "an interval needs four"),
        (["--seq-len", "60", "--attention", "cross"], 500, "no 'cross' attention"),
    ],
)
def test_bad_input_is_told_in_a_sentence(
    arguments: list[str],
    words: int,
    said: str,
    text_and_model: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text, original = text_and_model
    text.write_text(tiny.text(words))
    output = tmp_path / "roles"
    code, _, err = run(capsys, "roles", original, "--data", text, "--output", output, *arguments)
    assert (code, output.exists()) == (2, False)
    assert said in err


def test_a_module_that_gives_no_weights_is_named() -> None:
    model = tiny.model("llama-gqa")
    attention = model.model.layers[1].self_attn
    whole_forward = attention.forward
    attention.forward = lambda *args, **kwargs: (whole_forward(*args, **kwargs)[0], None)
    with pytest.raises(FamilyError, match=r"'model.layers.1.self_attn' gives no attention weights"):
        _watched(model, [torch.arange(5, 25)], 1, 0)


def test_a_model_without_room_for_two_runs_is_refused() -> None:
    model = tiny.model("llama-gqa")
    model.config.max_position_embeddings = 12
    with pytest.raises(DataError, match="two runs of 8 random tokens; the model takes 12 tokens"):
        repeated_inputs(model, tiny.tokenizer(), SMALL)


def test_a_check_counts_the_roles_that_are_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its copies of the token before, the induction head finds nothing any more."""
    text = tmp_path / "text.txt"
    text.write_text(tiny.text(1500))
    original = tiny.save(whole(), tmp_path / "original")
    spoilt = whole()
    planted.shuffled(spoilt, 0, 0)
    broken = tiny.save(spoilt, tmp_path / "spoilt")

    limits = ("--limit", "roles_lost == 0", "--limit", "roles_lost <= 2")
    quick = ("--seq-len", 60, "--role-sequences", 10, "--max-windows", 4, "--resamples", 1000)
    told = ("check", broken, "--against", original, "--data", text, *limits, *quick)
    code, out, err = run(capsys, *told, "--json")
    assert code == 1, err
    found = json.loads(out)["limits"]
    assert [one["verdict"] for one in found] == ["broken", "passed"]
    assert found[0]["names"] == ["previous-token", "induction"]


@pytest.mark.parametrize(("surely", "verdict"), [((), "cannot decide"), (("induction",), "broken")])
def test_a_role_that_a_head_nearly_has_is_not_surely_lost(
    surely: tuple[str, ...], verdict: str
) -> None:
    config = CheckConfig(model="m", data="d")
    found = LostRoles(("induction",), surely, sequences=12).judge(
        parse_limit("roles_lost == 0"), config
    )
    assert (found.verdict.value, found.n_needed) == (verdict, None)
