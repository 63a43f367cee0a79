"""Every row of the family table: gate = cut = reloaded, decoding, layers without heads."""

import copy
import functools
import json
import tempfile
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch

import headprune
from headprune.config import DataConfig, EvaluateConfig, TrainGatesConfig
from headprune.errors import DataError, FamilyError, PlanError, ProofError
from headprune.evaluation.evaluate import evaluate
from headprune.family import FAMILIES
from headprune.gates.train_gates import train_gates
from headprune.model import probes
from headprune.model.attention import attention_of, family_of, of_kinds
from headprune.model.loading import task_of
from headprune.planning.choose import CutRequest
from headprune.proof import equivalence
from headprune.result.prune import prune
from headprune.schemas.plan import AttentionPlan, Plan
from headprune.surgery.cut import cut_heads, resolve
from headprune.tensors.units import Unit
from tests import tiny
from tests.cutting import expecting, gap, prove, uneven_plan
from tests.marks import slow_unless

TOLERANCE = equivalence.TOLERANCE[torch.float32]
KINDS = ("encoder", "decoder", "cross")
EMPTY = {"none": (), "first": (0,), "last": (-1,), "both": (0, -1)}
# the attention that a family has by default; in detail, tests.test_surgery is about a case of each
# layout of projections
DEFAULT = ("default", "first")
EVERY = sorted({*tiny.FAMILY_CASES, *tiny.CASES})
PER_ROW = tiny.one_per_row(tiny.FAMILY_CASES)


def build(case, attn):
    """A tiny model, or a skip where its classes have no such attention.

    It is read from disk, since a model that was remembers how its tensors were called there.
    """
    if attn == "sdpa" and not read(case, "eager")._supports_sdpa:
        pytest.skip(f"{case} has no sdpa")
    return copy.deepcopy(read(case, attn))


@functools.lru_cache(maxsize=2)  # all that is done with a case comes in a row
def read(case, attn):
    """A tiny model from disk; nobody changes it."""
    with tempfile.TemporaryDirectory() as folder:
        tiny.model(case).save_pretrained(folder)
        how = None if attn == "default" else attn
        return headprune.from_pretrained(folder, attn_implementation=how)


def test_cases_are_chosen_by_what_their_models_are():
    cases = {*tiny.FAMILY_CASES, *tiny.CASES}
    built = {case: tiny.model(case) for case in cases}
    assert {case: tiny.task(case) for case in cases} == {c: task_of(m) for c, m in built.items()}
    found = {case: attention_of(model)[0].kv_heads for case, model in built.items()}
    assert {case: tiny.kv_heads(case) for case in cases} == found


@pytest.mark.parametrize(
    ("attn", "empty"),
    slow_unless(
        lambda attn, empty: (attn, empty) == DEFAULT,
        [
            DEFAULT,
            *product(["eager"], ["none", "first", "last"]),
            *product(["sdpa"], ["none", "both"]),
        ],
    ),
)
@pytest.mark.parametrize("case", slow_unless(PER_ROW.__contains__, tiny.FAMILY_CASES))
def test_gated_is_cut_is_reloaded(case, attn, empty, tmp_path):
    model = build(case, attn)
    cuts = resolve(uneven_plan(model, *EMPTY[empty]), model)
    result = prove(model, cuts, tmp_path / "cut")
    assert result.passed
    if any(cut.query_positions for cut in cuts):
        assert result.control is not None and result.control > 1e2 * result.tolerance


@pytest.mark.parametrize("case", slow_unless(tiny.one_per_row(EVERY).__contains__, EVERY))
def test_a_cut_of_another_head_fails_the_proof(case):
    model = tiny.model(case)
    cuts = resolve(uneven_plan(model), model)
    inputs = probes.probe_inputs(model)
    wanted = equivalence.probe_gated(model, cuts, inputs)
    first = next(i for i, c in enumerate(cuts) if c.scale and len(set(c.scale)) > 1)
    cuts[first] = replace(cuts[first], scale=cuts[first].scale[::-1])
    cut_heads(model, cuts)
    cut = probes.probe(model, inputs)
    with pytest.raises(ProofError, match="nothing was written"):
        equivalence.conclude(expecting(wanted), cut)


@pytest.mark.parametrize("case", slow_unless(PER_ROW.__contains__, tiny.FAMILY_CASES))
def test_an_even_cut_is_a_plain_config_where_the_row_says_so(case, tmp_path):
    model = build(case, "eager")
    family, parts = family_of(model.config), {}
    for layer, a in enumerate(attention_of(model)):
        group = a.query_heads // a.kv_heads
        gone = layer % a.kv_heads if a.kv_heads > 1 else None
        keep = tuple(h for h in range(a.query_heads) if h // group != gone)
        parts[a.path] = AttentionPlan(query_heads=a.query_heads, kv_heads=a.kv_heads, keep=keep)
    cuts = resolve(Plan(unit=Unit.HEAD, attentions=parts), model)
    native = family.native and not any(getattr(model.config, k, 0) for k in family.native_unless)
    untouched = all(len(cut.query_positions) == cut.attention.query_heads for cut in cuts)
    folder = tmp_path / "cut"
    assert gap(model, cuts, folder) <= TOLERANCE
    written = json.loads((folder / "config.json").read_text())
    assert ("headprune" in written) is ("auto_map" in written) is not (native or untouched)
    assert bool(list(folder.glob("*.py"))) is not (native or untouched)


RAGGED = [
    case
    for case in tiny.FAMILY_CASES
    if "num_key_value_groups" in FAMILIES[tiny.family_of_case(case)].size_attributes
    and tiny.kv_heads(case) == 3
]


@pytest.mark.parametrize("attn", slow_unless("eager".__eq__, ["eager", "sdpa"]))
@pytest.mark.parametrize("case", slow_unless(tiny.one_per_row(RAGGED).__contains__, RAGGED))
def test_ragged_groups_load_through_the_runtime(case, attn, tmp_path):
    model = build(case, attn)
    parts, keep = {}, [(0, 2, 3), (1, 2, 3, 4, 5), (0, 1, 2, 4, 5), (3,)]
    for layer, a in enumerate(attention_of(model)):
        scale = tuple(1 - 0.05 * h for h in keep[layer])
        parts[a.path] = AttentionPlan(query_heads=6, kv_heads=3, keep=keep[layer], scale=scale)
    plan = Plan(unit=Unit.HEAD, attentions=parts)
    with pytest.raises(PlanError, match="--layout ragged"):
        resolve(plan, model)
    proven = prove(model, resolve(plan, model, ragged=True), tmp_path / "cut")
    assert proven.passed
    assert proven.control is not None and proven.control > 1e2 * proven.tolerance
    reloaded = headprune.from_pretrained(tmp_path / "cut")
    groups = [a.group_sizes for a in attention_of(reloaded)]
    assert groups == [(1, 2), (1, 2, 2), (2, 1, 2), (1,)]
    if reloaded.can_generate():
        ids = probes.probe_inputs(reloaded)["input_ids"][:1]
        options = {"max_new_tokens": 9, "do_sample": False}
        uncached = reloaded.generate(ids, use_cache=False, **options).tolist()
        assert reloaded.generate(ids, **options).tolist() == uncached
    # cut once more: the first group of the second layer goes
    first = attention_of(reloaded)[1]
    again = {a.path: tuple(sorted(a.query_ids)) for a in attention_of(reloaded)}
    again[first.path] = (2, 3, 4, 5)
    parts = {
        a.path: AttentionPlan(query_heads=a.query_heads, kv_heads=a.kv_heads, keep=again[a.path])
        for a in attention_of(reloaded)
    }
    cuts = resolve(Plan(unit=Unit.HEAD, attentions=parts), reloaded, ragged=True)
    assert gap(reloaded, cuts, tmp_path / "again") <= TOLERANCE
    assert attention_of(reloaded)[1].group_sizes == (2, 2)


@pytest.mark.parametrize(
    ("case", "kind"),
    slow_unless(
        lambda case, kind: (case, kind) == ("t5", "cross"),
        product(tiny.present("marian", "t5"), KINDS),
    ),
)
def test_gates_of_one_kind_of_attention_leave_the_others_whole(case, kind, tmp_path):
    source = tiny.save(tiny.model(case), tmp_path / "model")
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"de": tiny.text(9 + i % 4, i), "en": tiny.text(8 + i % 3, i)} for i in range(12)]
    pairs.write_text("\n".join(map(json.dumps, rows)))
    data = DataConfig(source=str(pairs), text_column="de,en")
    settings = {"steps": 4, "batch_size": 3, "seq_len": 16}
    config = TrainGatesConfig(target_heads=0.5, attention=(kind,), **settings)
    run = train_gates(source, data, tmp_path / "gates", config)
    kept = run.metadata.kept_heads
    assert kept == run.metadata.query_heads // 2
    prune(source, tmp_path / "out", CutRequest(gates=tmp_path / "gates"))
    cut = headprune.from_pretrained(tmp_path / "out")
    left = {k: sum(a.query_heads for a in of_kinds(attention_of(cut), (k,))) for k in KINDS}
    whole = {a.kind: 0 for a in attention_of(cut)}
    for a in attention_of(headprune.from_pretrained(source)):
        whole[a.kind] += a.query_heads
    assert run.metadata.query_heads == whole[kind]
    assert left == {**whole, kind: kept}
    settings = EvaluateConfig(seq_len=16)
    report = evaluate(str(tmp_path / "out"), data, settings, against=str(source))
    assert report.model.cost.query_heads == sum(left.values())
    assert report.differences[0].interval.n == len(rows)
    one = DataConfig(source=str(pairs), text_column="de")
    with pytest.raises(DataError, match="SOURCE,TARGET"):
        train_gates(source, one, tmp_path / "other", config)


def test_a_family_that_transformers_changed_asks_for_the_newer_one(monkeypatch):
    config = tiny.config("t5")
    module = "headprune.model.attention.transformers"
    monkeypatch.setattr(module, SimpleNamespace(__version__="5.14.2"))
    with pytest.raises(FamilyError, match=r"needs transformers 5.15; installed is 5.14.2"):
        family_of(config)
    monkeypatch.setattr(module, SimpleNamespace(__version__="5.15.0"))
    assert family_of(config).model_type == "t5"


def test_a_kind_that_is_not_there_is_named():
    attentions = attention_of(tiny.model("bart"))
    with pytest.raises(FamilyError, match="no 'crossed' attention. Did you mean 'cross'"):
        of_kinds(attentions, ("crossed",))
    assert len(of_kinds(attentions, ())) == len(attentions)


@pytest.mark.parametrize("case", tiny.present("clip", "wav2vec2"))
def test_training_on_text_is_refused_where_there_is_none(case, tmp_path):
    source = tiny.save(getattr(tiny.model(case), "wav2vec2", tiny.model(case)), tmp_path / "model")
    (tmp_path / "text.txt").write_text(tiny.text(100))
    data = DataConfig(source=str(tmp_path / "text.txt"))
    with pytest.raises(FamilyError, match="reads text.*prune --plan"):
        train_gates(source, data, tmp_path / "gates", TrainGatesConfig(target_heads=0.5))


@pytest.mark.parametrize("case", tiny.present("bart", "t5", "clip_vision_model"))
def test_prune_works_on_models_without_text_and_with_three_kinds(case, tmp_path):
    model = tiny.model(case)
    source = tiny.save(model, tmp_path / "model")
    result = prune(source, tmp_path / "out", CutRequest(plan=uneven_plan(model, 0)))
    assert result.manifest.proof.gated_vs_reloaded < 2e-5


@pytest.mark.parametrize("case", tiny.present("t5", "mt5"))
def test_the_encoder_of_a_cut_encoder_decoder_loads_on_its_own(case, tmp_path):
    model = tiny.model(case)
    cuts = resolve(uneven_plan(model), model)
    cut_heads(model, cuts)
    model.save_pretrained(tmp_path)
    encoder = headprune.from_pretrained(tmp_path, auto_class="AutoModelForTextEncoding")
    inputs = probes.probe_inputs(model)
    with torch.no_grad():
        wanted = model(**inputs).encoder_last_hidden_state
        got = encoder(inputs["input_ids"], attention_mask=inputs["attention_mask"])
    torch.testing.assert_close(got.last_hidden_state, wanted)
