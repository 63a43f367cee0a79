"""Scores and plans: known answers, what they must not depend on, and what is refused."""

import itertools
import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from headprune import app as cli
from headprune.config import CalibrationConfig, DataConfig, ScoreConfig
from headprune.errors import CheckpointError, DataError, PlanError
from headprune.evidence.criteria import CRITERIA
from headprune.evidence.losses import example_losses
from headprune.evidence.score import needs_of, score, scores_of
from headprune.evidence.statistics import Activations, Statistics, collect
from headprune.model.attention import attention_of
from headprune.model.cost import STUB, model_cost
from headprune.model.gating import fixed, gated
from headprune.model.heads import read_heads, read_output, write_heads, write_output
from headprune.model.loading import task_of
from headprune.model.open import open_model
from headprune.planning.allocation import BudgetLimit, allocate
from headprune.planning.budgets import Prices, cache_prices, parameter_prices
from headprune.planning.choose import CutRequest, choose
from headprune.result.prune import prune
from headprune.runtime.modeling_headprune import kv_owners
from headprune.schemas.manifest import read_manifest
from headprune.schemas.scores import read_scores
from headprune.surgery.cut import cut_heads, resolve
from headprune.tensors.least_squares import REMOVAL_RIDGE
from headprune.tensors.units import Unit, members
from tests import tiny
from tests.cutting import chosen, uneven_plan

SMALL = CalibrationConfig(calibration_tokens=256, seq_len=16)
SEE_ZEROS = [
    *("gradient", "fisher", "fluctuation", "wanda", "reconstruction", "compensated", "magnitude"),
]


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(tiny.text(3000))
    return DataConfig(source=str(tmp_path / "text.txt"))


def batches(model, count=8, size=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 60, (count, 12), generator=generator)
    every = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    starts = range(0, count, size)
    return [{n: v[i : i + size] for n, v in every.items()} for i in starts]


def scored(model, names, rows):
    """Scores of single heads, in memory."""
    attentions = attention_of(model)
    evidence = collect(model, attentions, rows, needs_of(names))
    return {name: scores_of(name, evidence, attentions, Unit.HEAD) for name in names}


@pytest.mark.parametrize(
    "case", tiny.present("llama-gqa", "gpt2", "bert-mlm", "marian", "gpt_neox")
)
def test_useless_heads_come_last(case, tmp_path, text):
    model = tiny.model(case)
    useless = {}
    for number, attention in enumerate(attention_of(model)):
        head = number % attention.query_heads
        heads, bias = read_output(attention)
        heads[head] = 0.0
        write_output(attention, heads, bias)
        useless[attention.path] = head
    tiny.save(model, tmp_path / "model")
    data = text
    if case == "marian":
        pairs = "\n".join(f"{tiny.text(9, i)}\t{tiny.text(8, i)}" for i in range(12))
        (tmp_path / "pairs.tsv").write_text(f"de\ten\n{pairs}\n")
        data = DataConfig(source=str(tmp_path / "pairs.tsv"), text_column="de,en")
    found = score(
        tmp_path / "model",
        tmp_path / "s",
        SMALL.part(ScoreConfig, criterion=SEE_ZEROS, unit=Unit.HEAD),
        data,
    )
    for name, values in found.scores.items():
        parts = values.split(list(found.metadata.units))
        for module, part in zip(found.metadata.modules, parts, strict=True):
            planted = part[useless[module]]
            assert planted == part.min(), (name, module, part)
            assert (part > planted).sum() == len(part) - 1, (name, module, part)


def _first_removal(x, weight, heads, biased):
    """The head that the others replace best, and its cost, by plain least squares on tokens."""
    about = x - x.mean(0) if biased else x
    ridge = (REMOVAL_RIDGE * about.square().sum(0).mean()).sqrt()
    costs = []
    for head in range(heads):
        rest = torch.ones(x.shape[1], dtype=torch.bool)
        rest[head * (x.shape[1] // heads) : (head + 1) * (x.shape[1] // heads)] = False
        towards = torch.eye(int(rest.sum())).double() * ridge  # the others stay near themselves
        rows, wanted = torch.cat([x[:, rest], towards]), x @ weight.T
        if biased:
            ones = torch.ones(len(x), 1).double()
            rows = torch.cat([rows, F.pad(ones, (0, 0, 0, len(towards)))], 1)
        wanted = torch.cat([wanted, towards @ weight[:, rest].T])
        fitted = torch.linalg.lstsq(rows, wanted).solution
        costs.append(float((wanted - rows @ fitted).square().sum()))
    return min(range(heads), key=costs.__getitem__), min(costs)


@pytest.mark.parametrize("criterion", ["reconstruction", "compensated"])
@pytest.mark.parametrize(
    "case", tiny.present("qwen2", "gpt2", "opt", "bert-mlm", "marian", "gpt_neox", "vit")
)
def test_a_bias_of_the_output_takes_over_what_is_constant(case, criterion):
    model = tiny.model(case, torch.float64)
    inputs = {}
    attentions = attention_of(model)
    for attention in attentions:

        def nearly_constant(module, args, path=attention.path):
            heads = args[0].unflatten(-1, (len(of_path[path].query_ids), -1)).clone()
            heads[..., 1, :] = 5 + heads[..., 1, :] / 100
            inputs[path] = heads.detach().flatten(-2).flatten(0, -2)
            return heads.flatten(-2), *args[1:]

        attention.output_projection.register_forward_pre_hook(nearly_constant)
    of_path = {attention.path: attention for attention in attentions}
    rows = batches(model, 16, 16)
    if case == "vit":
        pixels = torch.randn(16, 3, model.config.image_size, model.config.image_size)
        rows = [{"pixel_values": pixels.double()}]
    if case == "marian":
        rows[0]["decoder_input_ids"] = rows[0].pop("labels")
    evidence = collect(model, attentions, rows, frozenset({"gram", "activations"}))
    for attention, part in zip(attentions, evidence, strict=True):
        heads, bias = read_output(attention)
        hidden = heads.shape[1]
        part.collected |= {"curvature": torch.linspace(1, 2, hidden), "recall": None}
        root = part.curvature.sqrt()[:, None] if criterion == "compensated" else torch.ones(1)
        weight = heads.transpose(0, 1).flatten(1).double() * root
        units = members(Unit.HEAD, attention.group_sizes)
        costs = CRITERIA[criterion].score(part, units)
        biased = bias is not None
        x = inputs[attention.path]
        cheapest, cost = _first_removal(x, weight, len(heads), biased)
        assert int(costs.argmin()) == cheapest
        # the Gram matrices are sums in float32
        rounded = 1e-7 * float(costs.max())
        assert float(costs.min()) == pytest.approx(cost, rel=1e-6, abs=rounded)
        assert biased == (cheapest == 1)  # without a bias the others cannot stand in for it
        other = _first_removal(x, weight, len(heads), not biased)
        assert other != (cheapest, pytest.approx(cost, rel=1e-2))


def test_of_a_duplicated_pair_one_may_go_and_not_both(text, tmp_path):
    model = tiny.model("gpt2")
    attention = attention_of(model)[0]
    heads = read_heads(attention)
    for role in ("q", "k", "v"):
        for tensor in (getattr(heads, role), getattr(heads, f"{role}_bias")):
            tensor[1] = tensor[4]
    write_heads(attention, heads)
    tiny.save(model, tmp_path / "model")
    found = score(
        tmp_path / "model",
        tmp_path / "s",
        SMALL.part(ScoreConfig, criterion=["reconstruction"], unit=Unit.HEAD),
        text,
    )
    first = found.scores["reconstruction"][: attention.query_heads]
    order = first.argsort().tolist()
    assert order[0] in (1, 4)
    assert first[order[0]] < first.median() / 10  # the ridge keeps it from nothing
    other = 5 - order[0]
    assert first[other] > 10 * first[order[0]]
    assert first[other] >= first.median() / 10


@pytest.mark.parametrize("case", tiny.present("llama-gqa", "bert-mlm"))
def test_scores_do_not_depend_on_the_batch_size(case, text, tmp_path):
    tiny.save(tiny.model(case, torch.float64), tmp_path / "model")
    names = [name for name in SEE_ZEROS if name != "magnitude"]
    one, many = (
        score(
            tmp_path / "model",
            tmp_path / f"s{size}",
            SMALL.model_copy(update={"batch_size": size}).part(ScoreConfig, criterion=names),
            text,
        )
        for size in (1, 5)
    )
    for name in names:
        torch.testing.assert_close(one.scores[name], many.scores[name], rtol=1e-9, atol=1e-12)
    other = score(
        tmp_path / "model",
        tmp_path / "s",
        SMALL.model_copy(update={"calibration_tokens": 128}).part(ScoreConfig, criterion=names),
        text,
    )
    assert not torch.allclose(other.scores["fisher"], one.scores["fisher"], rtol=1e-6)


@pytest.mark.parametrize("case", tiny.present("gpt2", "bert-mlm", "bert-base"))
def test_padding_counts_for_nothing(case):
    model = tiny.model(case, torch.float64)
    short = {name: value[:, :7] for name, value in batches(model, 3, 3)[0].items()}
    padded = {name: torch.cat([v, v[:, :5]], 1) for name, v in short.items()}
    padded["attention_mask"][:, 7:] = 0
    names = ["gradient", "fisher", "fluctuation", "wanda"]
    bare = scored(model, names, [short])
    with_padding = scored(model, names, [padded])
    for name in names:
        torch.testing.assert_close(bare[name], with_padding[name], rtol=1e-7, atol=1e-10)
    padded["attention_mask"][:, 7:] = 1  # and so it does where it is none
    assert not torch.allclose(scored(model, names, [padded])["wanda"], bare["wanda"])


def test_scores_of_shards_add_up():
    model = tiny.model("gpt2", torch.float64)
    attentions, needs = attention_of(model), needs_of(["fisher", "wanda"])
    whole = collect(model, attentions, batches(model), needs)
    parts = [collect(model, attentions, [b], needs) for b in batches(model)]
    for position, evidence in enumerate(whole):
        shards = [part[position] for part in parts]
        assert shards[0].activations is not None and evidence.activations is not None
        total = shards[0].activations
        for shard in shards[1:]:
            assert shard.activations is not None
            total = total + shard.activations
        assert total.tokens == evidence.activations.tokens
        torch.testing.assert_close(total.squares, evidence.activations.squares)
        gradients = torch.cat([shard.gradients for shard in shards])
        torch.testing.assert_close(gradients, evidence.gradients)
        fisher = [(CRITERIA["fisher"].score(s, [[0]]), len(s.gradients)) for s in shards]
        mean = sum(f * n for f, n in fisher) / sum(n for _, n in fisher)
        torch.testing.assert_close(mean, CRITERIA["fisher"].score(evidence, [[0]]))


@pytest.mark.parametrize("case", tiny.present("llama-gqa", "bert-mlm", "bert-base"))
def test_gradients_are_finite_differences(case):
    model = tiny.model(case, torch.float64)
    rows, attentions, task = batches(model, 3, 3), attention_of(model), task_of(model)
    found = collect(model, attentions, rows, needs_of(["gradient"]))
    step = 3e-3  # the norms of some models compute in float32, whose noise a smaller one shows
    for position, head in ((0, 0), (1, 2)):
        losses = []
        for sign in (1, -1):
            gates = [torch.ones(a.query_heads, dtype=torch.float64) for a in attentions]
            gates[position][head] += sign * step
            with torch.no_grad(), gated(attentions, fixed(gates)):
                losses.append(example_losses(model, task, rows[0]))
        difference = (losses[0] - losses[1]).double() / (2 * step)
        gradients = found[position].gradients
        torch.testing.assert_close(gradients[:, head], difference, rtol=2e-2, atol=2e-4)
        assert not torch.allclose(gradients[:, head], difference * 1.1, rtol=2e-2, atol=2e-4)


@pytest.mark.quick
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_an_exact_plan_is_the_best_of_all(data):
    model = tiny.model("llama-gqa")
    attentions = attention_of(model)[:2]
    count = sum(a.query_heads for a in attentions)
    scores = data.draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    prices = parameter_prices(model, attentions)
    whole = prices.total([(a.query_heads, a.kv_heads) for a in attentions])
    share = data.draw(st.floats(0.05, 0.95))
    most = prices.rest + share * (whole - prices.rest)
    scores = [float(value) for value in scores]
    heads = data.draw(st.integers(1, count))

    def spent(kept):
        used, start = [], 0
        for a in attentions:
            own = [at - start for at in kept if start <= at < start + a.query_heads]
            used.append((len(own), len({kv_owners(a.group_sizes)[q] for q in own})))
            start += a.query_heads
        return prices.total(used)

    possible = [k for k in itertools.combinations(range(count), heads) if spent(k) <= most]
    limit = BudgetLimit(prices, most, "--max-params")
    if not possible:
        with pytest.raises(PlanError, match="No plan keeps to all of this") as told:
            allocate(attentions, Unit.HEAD, scores, heads, limits=[limit])
        assert f"{most:.6g} at most, {prices.rest:.6g} are left without any head" in str(told.value)
        return
    kept = allocate(attentions, Unit.HEAD, scores, heads, limits=[limit])
    assert len(kept) == heads
    assert spent(tuple(kept)) <= most * (1 + 1e-9)
    assert sum(scores[at] for at in kept) == max(sum(scores[at] for at in k) for k in possible)


@pytest.mark.parametrize("case", tiny.present("llama-gqa", "gpt2", "falcon-new", "bart", "qwen3"))
def test_parameter_prices_are_what_a_cut_leaves(case):
    model = tiny.model(case)
    attentions, prices = attention_of(model), parameter_prices(model, attention_of(model))
    cuts = resolve(uneven_plan(model), model)
    kept = [(len(c.query_positions), len(c.kv_positions)) for c in cuts]
    expected = prices.total(kept)
    cut_heads(model, cuts)
    assert model.num_parameters() == expected
    assert prices.total([(a.query_heads - 1, a.kv_heads) for a in attentions]) != expected


def test_budgets_are_kept_to(tmp_path, text):
    folder = tiny.save(tiny.model("llama-gqa"), tmp_path / "model")
    score(
        folder, tmp_path / "s", SMALL.part(ScoreConfig, criterion=["fisher"], unit=Unit.HEAD), text
    )

    def made(**budget):
        return chosen(folder, tmp_path / "s", layout="ragged", **budget).plan

    model = tiny.model("llama-gqa")
    heads = sum(a.query_heads for a in attention_of(model))
    for count in (1, heads // 2, heads - 1, heads):
        assert made(keep=count).kept_heads == count
    quarter = CutRequest(scores=tmp_path / "s", keep=0.25, layout="ragged")
    free, filled = (choose(open_model(folder), quarter, empty).plan for empty in (True, False))
    assert free.kept_heads == filled.kept_heads == heads // 4
    assert all(a.keep for a in filled.attentions.values())
    cached = cache_prices(model, attention_of(model), torch.float32, 1)
    stubs = 3 * STUB * model.dtype.itemsize  # of as many layers without heads: less than a KV head
    limit = int(cached.total([(6, 1)] * 4)) + stubs
    small = made(max_kv_bytes=limit)
    groups = [
        len({kv_owners(a.group_sizes)[q] for q in small.attentions[a.path].keep})
        for a in attention_of(model)
    ]
    assert sum(groups) == 4  # used up, by whichever layers matter
    shrunk = tiny.model("llama-gqa")
    cut_heads(shrunk, resolve(small.model_copy(update={"model": None}), shrunk, ragged=True))
    spent = cached.total([(a.query_heads, a.kv_heads) for a in attention_of(shrunk)])
    assert model_cost(shrunk).kv_cache_bytes == spent <= limit
    prices = parameter_prices(model, attention_of(model))
    lean = made(max_params=int(prices.rest) + 4000)
    cuts = resolve(lean.model_copy(update={"model": None}), model, ragged=True)
    cut_heads(model, cuts)
    assert model.num_parameters() <= prices.rest + 4000
    assert lean.kept_heads > 0


@pytest.mark.quick
@pytest.mark.parametrize("largest", [1e3, 1e6, 1e9])
def test_one_large_score_does_not_blur_the_others(largest):
    model = tiny.model("gpt2")
    attentions, generator = attention_of(model), torch.Generator().manual_seed(0)
    scores = torch.rand(24, generator=generator).double()
    scores[5] = largest
    best = sorted(scores.argsort(descending=True)[:12].tolist())
    assert sorted(allocate(attentions, Unit.HEAD, scores.tolist(), 12)) == best
    prices = parameter_prices(model, attentions)
    free = BudgetLimit(prices, prices.total([(6, 6)] * 4), "--max-params")
    assert sorted(allocate(attentions, Unit.HEAD, scores.tolist(), 12, limits=[free])) == best


def test_prune_by_scores_is_plan_and_prune(tmp_path, text):
    folder = tiny.save(tiny.model("gpt2"), tmp_path / "model")
    score(folder, tmp_path / "s", SMALL.part(ScoreConfig, criterion=["compensated"]), text)
    made = chosen(folder, tmp_path / "s", keep=0.6).plan
    done = prune(folder, tmp_path / "out", CutRequest(scores=tmp_path / "s", keep=0.6))
    assert done.plan == made


def test_random_scores_follow_the_seed(tmp_path):
    folder = tiny.save(tiny.model("gpt2"), tmp_path / "model")
    found = [
        score(folder, tmp_path / str(n), ScoreConfig(criterion=["random"], seed=seed))
        for n, seed in enumerate((0, 0, 1))
    ]
    assert torch.equal(found[0].scores["random"], found[1].scores["random"])
    assert not torch.equal(found[0].scores["random"], found[2].scores["random"])


def run(capsys, monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["headprune", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    said = capsys.readouterr()
    return int(stop.value.code or 0), said.out, said.err


def test_scores_that_reckon_with_a_refit_get_one(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.save(tiny.model("llama-gqa"), tmp_path / "model")
    (tmp_path / "text.txt").write_text(tiny.text(3_000))
    small = ["--config", "calibration_tokens=256", "--config", "seq_len=16"]
    names = ["--criterion", "compensated", "--criterion", "fisher"]
    scored = ["score", "model", "--data", "text.txt", *names, "s", *small]
    assert run(capsys, monkeypatch, *scored)[0] == 0

    def cut(output, criterion, *more):
        words = ["prune", "model", "--scores", "s", "--criterion", criterion, "--keep", "0.5"]
        code, _, err = run(capsys, monkeypatch, *words, output, *more)
        done = code == 0 and read_manifest(tmp_path / output)
        return code, err, done and done.refit

    code, err, refit = cut("usual", "compensated")
    assert "it is made on their text, 'text.txt'" in err
    assert (code, refit.tokens) == (0, 256)  # as much of it as was scored on
    code, err, refit = cut("less", "compensated", "--config", "calibration_tokens=128")
    assert (code, refit.tokens) == (0, 128)
    code, err, refit = cut("without", "compensated", "--refit", "none")
    assert (code, refit, "cut with --refit DATA" in err) == (0, None, True)
    assert cut("fisher", "fisher")[::2] == (0, None)
    assert cut("whole", "compensated", "--keep", "1.0")[::2] == (0, None)
    (tmp_path / "text.txt").write_text(tiny.text(2_000))
    code, err, _ = cut("another", "compensated")
    assert (code, "'text.txt', has changed" in err) == (2, True)
    (tmp_path / "text.txt").unlink()
    code, err, _ = cut("gone", "compensated")
    assert (code, "'text.txt', is not here: give --refit DATA" in err) == (2, True)


def test_the_commands(tmp_path, text, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.save(tiny.model("llama-gqa"), tmp_path / "model")
    small = ["--config", "calibration_tokens=256", "--config", "seq_len=16"]
    names = ["--criterion", "fisher", "--criterion", "wanda"]
    code, out, _ = run(
        capsys, monkeypatch, "score", "model", "--data", "text.txt", *names, "s", *small
    )
    assert code == 0
    assert "headprune prune model s-pruned --scores s --criterion fisher" in out
    chosen = ["--scores", "s", "--criterion", "fisher", "--keep", "0.5"]
    planning = ("--dry-run", "--save-plan", "plan.json")
    code, out, _ = run(capsys, monkeypatch, "prune", "model", *chosen, *planning)
    assert code == 0
    assert re.search(r"query heads +24 +12 +50", out)
    code, out, _ = run(
        capsys, monkeypatch, "prune", "model", *chosen, "--refit", "text.txt", "out", *small
    )
    assert code == 0
    assert "W_O refitted" in out
    saved = json.loads((tmp_path / "out" / "plan.json").read_text())
    asked = json.loads((tmp_path / "plan.json").read_text())
    assert saved["attentions"] == asked["attentions"]


def test_bad_input(tmp_path, text):
    folder = tiny.save(tiny.model("gpt2"), tmp_path / "model")
    score(folder, tmp_path / "s", SMALL.part(ScoreConfig, criterion=["fisher", "wanda"]), text)
    scores = tmp_path / "s"

    def refused(error, match, action):
        with pytest.raises(error, match=match):
            action()

    out = tmp_path / "out"
    refused(
        PlanError,
        "Did you mean 'fisher'",
        lambda: score(folder, out, ScoreConfig(criterion=["fischer"]), text),
    )
    refused(DataError, "give --data", lambda: score(folder, out, ScoreConfig(criterion=["fisher"])))
    refused(
        CheckpointError,
        "already exists",
        lambda: score(folder, scores, ScoreConfig(criterion=["fisher"]), text),
    )
    refused(PlanError, "say which one", lambda: chosen(folder, scores, keep=0.5))
    other_criterion = {"keep": 0.5, "criterion": "random"}
    refused(PlanError, "They hold fisher, wanda", lambda: chosen(folder, scores, **other_criterion))
    few = {"keep": 3, "targets": ("vllm",), "criterion": "fisher"}
    refused(
        PlanError,
        "3 query heads in all; a head in each of 4",
        lambda: chosen(folder, scores, **few),
    )
    other = tiny.save(tiny.model("gpt_neox"), tmp_path / "other")
    refused(
        PlanError, "not of 'other'", lambda: chosen(other, scores, keep=0.5, criterion="fisher")
    )
    refused(
        PlanError,
        "--scores needs a budget: --keep",
        lambda: prune(folder, out, CutRequest(scores=scores)),
    )
    classifier = tiny.save(tiny.model("bert-classifier"), tmp_path / "classifier")
    refused(
        DataError,
        "label",
        lambda: score(classifier, out, SMALL.part(ScoreConfig, criterion=["fisher"]), text),
    )
    encoder = tiny.save(tiny.model("bert-base"), tmp_path / "encoder")
    score(encoder, tmp_path / "e", ScoreConfig(criterion=["magnitude"]))
    refused(
        PlanError, "generates nothing", lambda: chosen(encoder, tmp_path / "e", max_kv_bytes=10)
    )
    tensors = load_file(scores / "scores.safetensors")
    tensors["fisher"][3] = float("nan")
    save_file(tensors, scores / "scores.safetensors")
    damaged = "not as they were written"
    refused(
        CheckpointError, damaged, lambda: prune(folder, out, CutRequest(scores=scores, keep=0.5))
    )
    (scores / "scores.json").write_text("{}")
    refused(CheckpointError, "is not valid", lambda: read_scores(scores))
    assert not out.exists()


def test_nan_is_named_with_its_layer(tmp_path, text, monkeypatch):
    # what is looked at when a model is loaded is made up; text may overflow all the same
    monkeypatch.setattr("headprune.model.open.refuse_not_finite", lambda *_: None)
    folder = tiny.save(tiny.model("gpt2"), tmp_path / "model")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(n for n in tensors if "h.2.attn.c_attn.weight" in n)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    for criterion in ("wanda", "gradient"):
        with pytest.raises(DataError, match=r"in 'transformer\.h\.2\.attn' in batch 0"):
            score(folder, tmp_path / "s", SMALL.part(ScoreConfig, criterion=[criterion]), text)
    assert not (tmp_path / "s").exists()


def test_modules_that_run_twice_or_never(tmp_path, text):
    albert = tiny.save(tiny.model("albert"), tmp_path / "albert")
    with pytest.raises(PlanError, match="Score it by fisher, gradient or wanda"):
        score(albert, tmp_path / "a", SMALL.part(ScoreConfig, criterion=["compensated"]), text)
    score(albert, tmp_path / "a", SMALL.part(ScoreConfig, criterion=["fisher", "wanda"]), text)
    decoder = tiny.save(tiny.model("bart-causal"), tmp_path / "decoder")
    found = score(decoder, tmp_path / "d", SMALL.part(ScoreConfig, criterion=["compensated"]), text)
    assert found.scores["compensated"].isfinite().all()


def test_padding_alone_has_nothing_to_score():
    model = tiny.model("gpt2")
    batch = batches(model, 2, 2)[0]
    batch["attention_mask"][1] = 0
    with pytest.raises(DataError, match="Example 1 of a batch has no tokens to score"):
        example_losses(model, "causal-lm", batch)


def test_every_criterion_says_where_it_comes_from():
    weight = torch.ones(2, 3, 4)
    for name, criterion in CRITERIA.items():
        assert len(criterion.source) > 10, name
        assert len(criterion.sees) > 5, name
    inputs = Activations(torch.ones(2, 4), torch.ones(2, 4), 1)
    evidence = Statistics("a", lambda: weight, collected={"activations": inputs})
    assert CRITERIA["wanda"].score(evidence, []).shape == (0,)
    assert members(Unit.HEAD, (1, 1)) == [[0], [1]]
    assert Prices(1.0, ()).total([]) == 1.0
