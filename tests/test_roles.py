"""Roles: planted heads have them, spoilt ones do not; batches do not count; ablation; refusals."""

import io
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from rich.console import Console

from headprune.config import DataConfig, RolesConfig
from headprune.errors import DataError, FamilyError
from headprune.evidence.losses import example_losses
from headprune.model.attention import attention_of, layer_of
from headprune.model.batch import token_mask
from headprune.model.gating import fixed, gated
from headprune.model.heads import read_output, write_output
from headprune.model.loading import task_of
from headprune.model.passes import run_model
from headprune.planning.choose import CutRequest
from headprune.render.roles import roles as show
from headprune.result.prune import prune
from headprune.role import ROLES
from headprune.role.ablation import Out, head_means, random_sets, recorded, replayed, rises
from headprune.role.inputs import Reading, repeated_inputs, token_classes
from headprune.role.measure import roles
from headprune.role.scores import changes, score_of
from headprune.role.watch import watch
from headprune.role.writing import Contributions
from headprune.schemas.plan import AttentionPlan, Plan
from headprune.schemas.roles import RolesRecord
from headprune.tensors.units import Unit
from tests import planted, tiny
from tests.test_cli import run

SMALL = RolesConfig(sequences=8, seq_len=60, resamples=200)
PERIOD = 30  # two runs of 30 fit into the 64 places of the planted model, and into its 60 words


def whole():
    """Heads 0.0 to 0.2 and 1.0 do something."""
    model = planted.gpt2()
    planted.offset(model, 0, 0, by=1)
    planted.copies(model, 0)
    planted.offset(model, 0, 1, by=3)
    planted.duplicate(model, 0, 2)
    planted.induction(model, 0)
    return model


def measured(model, folder, **settings):
    text = folder / "text.txt"
    text.write_text(tiny.text(1500))
    place = tiny.save(model, folder / "model")
    data = DataConfig(source=str(text))
    config = SMALL.model_copy(update=settings)
    with patch("headprune.role.measure.save"):  # the command draws, in tests of it
        return roles(str(place), folder / "roles", data, config, overwrite=True)


def by_head(record):
    return {
        f"{layer}.{head.head}": head.role
        for layer, module in enumerate(record.modules)
        for head in module.heads
    }


def printed(record):
    console = Console(width=60, record=True, file=io.StringIO())
    show(console, record, Path("roles"))
    return console.export_text()


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return measured(whole(), tmp_path_factory.mktemp("whole"))


def test_every_role_says_what_it_is():
    for role in ROLES.values():
        assert role.source and role.definition[0].islower() and "    " in role.reference


def test_planted_heads_have_their_roles(record):
    assert by_head(record) == {
        **{"0.0": "previous-token", "0.1": "positional", "0.2": "duplicate-token"},
        **{"1.0": "induction"},
        **dict.fromkeys(("0.3", "1.1", "1.2", "1.3")),
    }
    first, second = (module.heads for module in record.modules)
    assert first[0].scores["previous-token"].score == pytest.approx(1, abs=1e-3)
    assert first[1].scores["positional"].variant == "-3"
    # the first token, which has none before it, is copied to its own place: a second match
    exact = (first[2], "duplicate-token", 1.0), (second[0], "induction", 1 - 0.5 / PERIOD)
    for head, role, score in exact:
        assert head.scores[role].score == pytest.approx(score, abs=1e-3)
        assert head.scores[role].control == pytest.approx(0, abs=0.1)
    assert "next-token" not in first[0].scores  # attention is causal


@pytest.mark.parametrize(
    ("place", "spoil"),
    [
        ("0.1", lambda model: planted.shuffled(model, 0, 1)),
        ("0.2", lambda model: planted.shuffled(model, 0, 2)),
        # without copies of the token before, an induction head finds nothing
        ("1.0", lambda model: planted.shuffled(model, 0, 0)),
        # the copy is one token late, so that the head looks at the wrong place
        ("1.0", lambda model: planted.offset(model, 0, 0, by=2)),
    ],
)
def test_spoilt_heads_do_not(place, spoil, record, tmp_path):
    model = whole()
    spoil(model)
    assert by_head(measured(model, tmp_path))[place] != by_head(record)[place]


@pytest.mark.parametrize(("by", "role"), [(PERIOD - 1, "induction"), (PERIOD, "duplicate-token")])
def test_a_head_that_looks_back_as_far_as_the_run_is_long_fails_its_control(by, role, tmp_path):
    model = planted.gpt2()
    planted.offset(model, 0, 0, by=by)
    head = measured(model, tmp_path).modules[0].heads[0]
    assert head.scores[role].low > ROLES[role].threshold
    assert head.scores[role].control == pytest.approx(1, abs=1e-3)
    assert (head.role, head.scores[role].state) == (None, "under")


@pytest.mark.parametrize("case", tiny.present("llama-gqa", "bert-mlm"))
def test_a_random_model_has_no_roles(case, tmp_path):
    random = measured(tiny.model(case), tmp_path)
    assert {*by_head(random).values()} == {None}


def batches_of(case):
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


@pytest.mark.parametrize("case", tiny.present("llama-gqa", "bert-mlm", "t5"))
def test_a_contribution_is_the_norm_of_what_one_head_writes(case):
    model, batches = batches_of(case)
    attentions = attention_of(model)
    norms = Contributions(model, attentions)
    watch(model, attentions, Reading(batches), {}, {}, contributions=norms)
    attention, shares = attentions[-1], norms.of(len(attentions) - 1)
    written = []
    residual = []
    with torch.no_grad():  # the others are silent
        weight, bias = read_output(attention)
        alone = torch.zeros_like(weight)
        alone[1] = weight[1]
        write_output(attention, alone, None if bias is None else torch.zeros_like(bias))
    layer = model.get_submodule(layer_of(attention.path))
    attention.output_projection.register_forward_hook(lambda m, a, o: written.append(o))
    layer.register_forward_pre_hook(lambda m, a: residual.append(a[0]))
    expected = []
    with torch.no_grad():
        for batch in batches:
            run_model(model, batch)
            share = written[-1].norm(dim=-1) / residual[-1].norm(dim=-1)
            expected.append(share[token_mask(batch, attention.kind)])
    mean = float(torch.cat(expected).mean())
    assert shares[1] == pytest.approx(mean, rel=1e-4) != shares[2]


def watched(model, rows, size, pad):
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
    classes = token_classes(tiny.tokenizer())
    return watch(model, attention_of(model), Reading(batches), on_text, classes)


@pytest.mark.parametrize("case", tiny.present("llama-gqa", "t5", "deberta-v2"))
def test_neither_batch_nor_padding_counts(case):
    model = tiny.model(case)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, 60, (n,), generator=generator) for n in (12, 20, 17)]
    alone = watched(model, rows, 1, 0)
    together = watched(model, rows, 3, 2)
    changed = watched(model, [rows[0].flip(0), *rows[1:]], 3, 2)
    differs = False
    for key, (sums, counts) in alone.sums.items():
        assert torch.equal(counts, together.sums[key][1])
        torch.testing.assert_close(sums, together.sums[key][0], atol=1e-4, rtol=1e-4)
        differs |= not torch.allclose(sums, changed.sums[key][0], atol=1e-4, rtol=1e-4)
    for key, (sums, _) in alone.controls.items():
        torch.testing.assert_close(sums, together.controls[key][0])
    assert differs  # another text would show


def test_the_best_of_many_offsets_is_judged_on_sequences_that_did_not_choose_it():
    """All offsets score one half: no more heads are surely above that than the level says."""
    heads, generator = 200, torch.Generator().manual_seed(0)
    counts = torch.full((32, 16), 100.0)
    sums = 50 + 10 * torch.randn(32, heads, 16, generator=generator)
    positional = ROLES["positional"]
    scores = [score_of(positional, (sums, counts), None, n, SMALL) for n in range(heads)]
    lows = [score.low for score in scores if score is not None]
    assert len(lows) == heads
    assert sum(low > 0.5 for low in lows) <= 12  # 5 expected; some 60 by sequences that choose


@pytest.mark.parametrize("case", tiny.present("llama-gqa", "albert", "t5"))
def test_the_loss_without_heads_is_that_of_the_whole_model_run_again(case, monkeypatch):
    model, batches = batches_of(case)
    attentions = attention_of(model)
    means = head_means(model, attentions, batches)
    heads = [(i, h) for i, a in enumerate(attentions) for h in range(a.query_heads)]
    alone = [(Out(i, (h,), by_mean),) for by_mean in (False, True) for i, h in heads]
    last = len(attentions) - 1
    together = [(Out(0, (0,), True), Out(last, places, True)) for places in ((0,), (1, 2))]
    by_ablation = rises(model, attentions, batches, means, [*alone, *together])
    every = [torch.ones(a.query_heads) for a in attentions]

    def loss(gates):
        with torch.no_grad(), gated(attentions, fixed(gates)):
            per_batch = [example_losses(model, task_of(model), batch) for batch in batches]
        return torch.cat(per_batch).double().mean()

    def closed(at, head):
        gate = every[at].index_fill(0, torch.tensor([head]), 0.0)
        return [*every[:at], gate, *every[at + 1 :]]

    expected = torch.stack([loss(closed(*head)) for head in heads]) - loss(every)
    zeroed = torch.stack([by_ablation[one].mean() for one in alone[: len(heads)]])
    torch.testing.assert_close(zeroed, expected, atol=1e-5, rtol=0)
    assert not torch.allclose(zeroed, expected.flip(0), atol=1e-5, rtol=0)
    # nothing is kept of the run before
    monkeypatch.setattr("headprune.role.ablation.replayed", lambda outputs: nullcontext())
    again = rises(model, attentions, batches, means, [*alone, *together])
    for one, rise in by_ablation.items():
        torch.testing.assert_close(rise, again[one], atol=1e-6, rtol=0)


def test_layers_run_as_often_as_something_changed(monkeypatch):
    """Two runs per head from its layer on, and sets of heads from where they first differ."""
    model, batches = batches_of("llama-gqa")
    attentions, layers = attention_of(model), model.model.layers
    means, runs = head_means(model, attentions, batches), []
    for layer in layers:
        layer.mlp.register_forward_hook(lambda *_: runs.append(1))
    alone = [(Out(i, (h,), m),) for i in range(4) for h in range(6) for m in (False, True)]
    rises(model, attentions, batches[:1], means, alone)
    assert len(runs) == 4 + 2 * 6 * (4 + 3 + 2 + 1)
    runs.clear()
    drawn = [(Out(0, (0,), True), Out(2, (head,), True)) for head in (0, 1, 1, 0)]
    exact = rises(model, attentions, batches[:1], means, drawn)
    assert len(runs) == 4 + 4 + 2

    # what layers behind the first that differs returned is stale
    def too_much(outputs):
        return replayed([*outputs, *stale[len(outputs) : -1]])

    with recorded(layers) as stale:
        run_model(model, batches[0])
    monkeypatch.setattr("headprune.role.ablation.replayed", too_much)
    spoilt = rises(model, attentions, batches[:1], means, drawn)
    assert not torch.allclose(spoilt[drawn[1]], exact[drawn[1]], atol=1e-5)


def test_effects_are_written_beside_roles(tmp_path):
    model = whole()
    planted.writes(model, 1, 0)
    record = measured(model, tmp_path, ablation_tokens=120)
    effects = [[head.effect for head in module.heads] for module in record.modules]
    assert all(effect is not None for layer in effects for effect in layer)
    idle = effects[1][1]  # writes nothing
    assert idle.zero.nats == idle.mean.nats == pytest.approx(0, abs=1e-6)
    text = printed(record)
    assert "The 6 heads that the loss needs most" in text and "All heads of a role at once" in text
    # a set of one head does what the head does
    alone, together = effects[1][0], record.sets["induction"]
    assert (together.heads, len(together.random)) == (1, 20)
    assert together.rise == alone.mean != alone.zero
    assert max(together.random) == pytest.approx(0, abs=1e-6)  # the others of its layer are idle


SMALLER = ["--config=sequences=8", "--config=seq_len=60", "--config=resamples=200", "--json"]


@pytest.fixture
def text_and_model(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(tiny.text(1500))
    return text, tiny.save(whole(), tmp_path / "original")


def test_what_a_cut_loses_has_the_numbers_of_the_original(text_and_model, record, tmp_path, capsys):
    text, original = text_and_model
    parts = {
        a.path: AttentionPlan(query_heads=4, kv_heads=4, keep=keep)
        for a, keep in zip(attention_of(whole()), ((2, 3), (0, 1, 2)), strict=True)
    }
    cut = prune(
        original, tmp_path / "cut", CutRequest(plan=Plan(unit=Unit.HEAD, attentions=parts))
    ).output
    arguments = ["--data", text, "--against", original, *SMALLER]
    code, out, _ = run(capsys, "roles", cut, *arguments, tmp_path / "roles")
    now = RolesRecord.model_validate_json(out)
    assert code == 0
    assert now == RolesRecord.model_validate_json((tmp_path / "roles/roles.json").read_text())
    drawn = {file.name for file in (tmp_path / "roles").iterdir()}
    assert drawn == {"roles.json", "roles.svg", "roles.png", "scores.svg", "scores.png"}
    assert by_head(now).keys() == {"0.2", "0.3", "1.0", "1.1", "1.2"}
    assert by_head(now)["0.2"] == "duplicate-token"
    assert now.original == record.modules
    by_role = {
        name: ([h.head for h in c.kept], [h.head for h in c.lost], c.is_lost)
        for name, c in now.changes.items()
    }
    assert by_role["previous-token"] == ([], [0], True)
    assert by_role["positional"] == ([], [0, 1], True)
    assert by_role["induction"] == ([], [0], True)  # still there, with nothing to match
    assert by_role["duplicate-token"] == ([2], [], False)
    text_of_cut = printed(now)
    assert "PO=b" in printed(record) and "induction lost: 1.0" in text_of_cut
    assert max(map(len, text_of_cut.splitlines())) <= 60
    # the other way round nothing is lost, and what was gone is new
    back = changes(now.modules, record.modules)
    assert [h.head for h in back["induction"].moved] == [0]
    assert not any(change.lost for name, change in back.items() if not ROLES[name].attribute)
    for change in changes(record.modules, record.modules).values():
        assert not (change.lost or change.moved or change.is_lost)


@pytest.mark.parametrize(
    ("arguments", "words", "said"),
    [
        (["--config", "seq_len=60"], 80, "an interval needs four"),
        (["--config", "seq_len=8", "--config", "sequences=4"], 500, "an interval needs four"),
        (["--config", "seq_len=60", "--config", "attention=cross"], 500, "no 'cross' attention"),
    ],
)
def test_bad_input_is_refused(arguments, words, said, text_and_model, tmp_path, capsys):
    text, original = text_and_model
    text.write_text(tiny.text(words))
    output = tmp_path / "roles"
    code, _, err = run(capsys, "roles", original, "--data", text, output, *arguments)
    assert (code, output.exists()) == (2, False)
    assert said in err


def test_models_without_loss_weights_or_room_are_refused(tmp_path):
    with pytest.raises(DataError, match="--ablation-tokens needs the loss .* a BertModel"):
        measured(tiny.model("bert-base"), tmp_path, ablation_tokens=120)
    model = tiny.model("llama-gqa")
    attention = model.model.layers[1].self_attn
    whole_forward = attention.forward
    attention.forward = lambda *args, **kwargs: (whole_forward(*args, **kwargs)[0], None)
    with pytest.raises(FamilyError, match=r"'model.layers.1.self_attn' gives no attention weights"):
        watched(model, [torch.arange(5, 25)], 1, 0)
    model.config.max_position_embeddings = 12
    with pytest.raises(DataError, match="two runs of 8 random tokens; the model takes 12 tokens"):
        repeated_inputs(model, tiny.tokenizer(), SMALL)


def test_a_head_that_says_the_same_of_everything_is_its_mean():
    model, batches = batches_of("llama-mha")
    attentions = attention_of(model)
    with torch.no_grad():  # the values of its first head are zero
        attentions[1].module.v_proj.weight[: attentions[1].head_dim] = 0
    means = head_means(model, attentions, batches)
    ablations = [(Out(1, (0,), True),), (Out(1, (0,), False),), (Out(1, (1,), True),)]
    mean, zero, second = rises(model, attentions, batches, means, ablations).values()
    assert mean.mean() == pytest.approx(0, abs=1e-5)
    assert abs(zero.mean()) > 1e-3
    assert abs(second.mean()) > 1e-4


def test_random_sets_have_as_many_heads_of_the_same_layers():
    attentions = attention_of(tiny.model("llama-gqa"))
    drawn = random_sets(attentions, {0: [1, 2], 2: [0, 1, 2, 3]}, seed=0)
    assert len(drawn) == 20
    for heads in drawn:
        assert {p: len(set(places)) for p, places in heads.items()} == {0: 2, 2: 4}
        assert not set(heads[0]) & {1, 2}
        assert {4, 5} < set(heads[2])  # the set's own, where others run out
    assert len({str(heads) for heads in drawn}) > 5
    assert random_sets(attentions, {0: [*range(6)]}, seed=0) == []
