"""Results know what they are: ids, what was done and by which evidence, and who measured what."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from headprune.config import (
    CalibrationConfig,
    CheckConfig,
    ConvertConfig,
    DataConfig,
    EvaluateConfig,
    HealConfig,
    ScoreConfig,
    TrainGatesConfig,
)
from headprune.context import CommandProvenance, Context
from headprune.distillation.heal import heal
from headprune.errors import CheckpointError, HeadpruneWarning, PlanError
from headprune.evaluation.evaluate import evaluate
from headprune.evaluation.report import Report
from headprune.evidence.score import score
from headprune.gates.train_gates import train_gates
from headprune.model.stored import id_of_model
from headprune.planning.choose import CutRequest
from headprune.regression.check import CheckReport, check
from headprune.render.report import report
from headprune.result.convert_gqa import convert_gqa
from headprune.result.prune import prune
from headprune.result.verify import verify
from headprune.schemas.gates import read_gates, read_metadata
from headprune.schemas.manifest import read_manifest
from headprune.schemas.records import Evidence, Healing, Merging, Pruning
from headprune.schemas.scores import read_scores
from tests import tiny
from tests.damage import edit, flip

EVALUATE = EvaluateConfig(seq_len=16, max_windows=8, speed=False)
SMALL = CalibrationConfig(calibration_tokens=600, seq_len=16)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One original, scored by one criterion, and cut to two sizes by these scores."""
    home = tmp_path_factory.mktemp("made")
    tiny.save(tiny.model("llama-gqa"), home / "base")
    (home / "text.txt").write_text(tiny.text(1_000))
    score(home / "base", home / "scores", SMALL.part(ScoreConfig, criterion=["magnitude"]))
    for name, keep in (("half", 0.5), ("most", 0.75)):
        provenance = CommandProvenance(command="prune", options={"keep": keep})
        prune(
            home / "base",
            home / name,
            CutRequest(scores=home / "scores", keep=keep),
            context=Context(provenance=provenance),
        )
    return home


@pytest.fixture
def home(made, tmp_path):
    """A copy of it, to be moved and damaged."""
    return Path(shutil.copytree(made, tmp_path / "home"))


def text_of(home):
    return DataConfig(source=str(home / "text.txt"))


def evidence_of(manifest):
    assert isinstance(manifest.done, Pruning)
    assert manifest.done.evidence is not None
    return manifest.done.evidence


# Of models and results


def test_an_id_is_of_content_and_not_of_place_or_time(home, tmp_path):
    manifest = read_manifest(home / "half")
    assert manifest.id == manifest.digest() == id_of_model(home / "half")
    assert json.loads((home / "half" / "headprune.json").read_text())["id"] == manifest.id
    assert manifest.id in (home / "half" / "README.md").read_text()
    again = prune(
        home / "base", tmp_path / "another name", CutRequest(scores=home / "scores", keep=0.5)
    )
    edit(again.output / "headprune.json", lambda m: m.update(created="2001-01-01T00:00:00+00:00"))
    shutil.move(again.output, tmp_path / "moved")
    assert read_manifest(tmp_path / "moved").id == manifest.id
    assert manifest.provenance == CommandProvenance(command="prune", options={"keep": 0.5})
    assert again.manifest.provenance is None
    assert read_manifest(home / "most").id != manifest.id


def test_a_byte_of_the_weights_makes_another_model(home, tmp_path):
    before = {name: id_of_model(home / name) for name in ("base", "half")}
    shutil.copytree(home / "base", tmp_path / "base")
    assert id_of_model(tmp_path / "base") == before["base"]
    for name in before:
        flip(home / name / "model.safetensors")
        assert id_of_model(home / name) != before[name]
    assert (
        before["half"] == read_manifest(home / "half").id
    )  # which does not speak of these weights
    assert not verify(home / "half").passed
    other = prune(
        home / "base", tmp_path / "half", CutRequest(scores=home / "scores", keep=0.5)
    ).manifest
    assert (before["base"], id_of_model(home / "base")) == (
        read_manifest(home / "half").parent,
        other.parent,
    )
    assert other.id != before["half"]


def test_a_config_and_every_shard_count(home):
    base = home / "base"
    whole = id_of_model(base)
    edit(base / "config.json", lambda config: config.update(rms_norm_eps=1e-3))
    changed = id_of_model(base)
    tensors = load_file(base / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, base / file, {"format": "pt"})
    (base / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {n: f for f, part in shards.items() for n in part}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    split = id_of_model(base)
    flip(base / "b.safetensors")
    assert len({whole, changed, split, id_of_model(base)}) == 4
    assert id_of_model(home / "scores") is None
    assert id_of_model("nobody/has-this") is None


# Of evidence


def test_a_cut_knows_its_scores(home):
    scores = read_scores(home / "scores")
    evidence = evidence_of(read_manifest(home / "half"))
    assert evidence == Evidence(
        kind="scores", id=scores.id, criterion="magnitude", keep=0.5, seed=SMALL.seed
    )
    assert (
        f"chosen by magnitude (scores {scores.id[:12]})"
        in (home / "half" / "README.md").read_text()
    )


def test_ids_of_scores(home, tmp_path):
    folder = home / "scores"
    before = read_scores(folder)
    assert before.metadata.id == before.id
    shutil.move(folder, tmp_path / "elsewhere")
    folder = tmp_path / "elsewhere"
    edit(folder / "scores.json", lambda m: m.update(created="", model={**m["model"], "name": "x"}))
    assert read_scores(folder).id == before.id
    edit(folder / "scores.json", lambda m: m["calibration"].update(seed=1))
    with pytest.raises(CheckpointError, match="not as they were written"):
        read_scores(folder)
    edit(folder / "scores.json", lambda m: m["calibration"].update(seed=SMALL.seed))
    assert read_scores(folder).id == before.id
    flip(folder / "scores.safetensors")
    with pytest.raises(CheckpointError, match="not as they were written"):
        read_scores(folder)


def test_a_cut_knows_its_gates(home, tmp_path):
    config = TrainGatesConfig(target_heads=0.5, steps=2, batch_size=2, seq_len=16, seed=3)
    train_gates(home / "base", text_of(home), tmp_path / "gates", config)
    trained = read_gates(tmp_path / "gates", read_metadata(tmp_path / "gates").model)
    done = prune(home / "base", tmp_path / "out", CutRequest(gates=tmp_path / "gates")).manifest
    assert evidence_of(done) == Evidence(kind="gates", id=trained.id, seed=3)
    assert trained.metadata.id == trained.id

    def now(folder):
        return read_gates(folder, trained.metadata.model).id

    moved = Path(shutil.move(tmp_path / "gates", tmp_path / "moved"))
    edit(moved / "gates.json", lambda m: m.update(data="text that lies elsewhere"))
    assert now(moved) == trained.id
    edit(moved / "gates.json", lambda m: m.update(seed=4))
    with pytest.raises(CheckpointError, match="not as they were written"):
        now(moved)
    edit(moved / "gates.json", lambda m: m.update(seed=3))
    tensors = load_file(moved / "gates.safetensors")
    tensors["course"][0] += 0.01
    save_file(tensors, moved / "gates.safetensors")
    with pytest.raises(CheckpointError, match="not as they were written"):
        now(moved)


def test_a_chain_knows_its_parents(home, tmp_path):
    by = [CommandProvenance(command=name, options={}) for name in ("convert-gqa", "heal")]
    config = ConvertConfig(kv_heads=1)
    merged = convert_gqa(
        home / "half", tmp_path / "merged", config, context=Context(provenance=by[0])
    ).pruned
    training = HealConfig(steps=1, batch_size=2, seq_len=16, seed=5)
    healed = heal(
        *(merged.output, home / "base", text_of(home), tmp_path / "healed", training),
        context=Context(provenance=by[1]),
    ).pruned
    base, half = id_of_model(home / "base"), id_of_model(home / "half")
    steps = healed.manifest.steps
    assert [step.parent for step in steps] == [base, half, merged.manifest.id]
    assert [step.id for step in steps] == [half, merged.manifest.id, healed.manifest.id]
    assert [step.provenance for step in steps][1:] == by
    _, merging, healing = (step.done for step in steps)
    assert isinstance(merging, Merging)
    assert (merging.merge, merging.seed) == ("mean", 0)
    assert isinstance(healing, Healing)
    assert (healing.teacher_id, healing.seed, healing.steps) == (base, 5, 1)
    assert read_manifest(healed.output).steps[:-1] == steps[:-1]
    # times stand in the history of a healing, and teachers may lie anywhere
    facts = {"files": {**healed.manifest.files, "heal.jsonl": "0" * 64}}
    facts["done"] = healing.model_copy(update={"teacher": "elsewhere"})
    assert healed.manifest.model_copy(update=facts).digest() == healed.manifest.id
    facts["done"] = healing.model_copy(update={"steps": 2})
    assert healed.manifest.model_copy(update=facts).digest() != healed.manifest.id


# Of what was measured


def test_an_evaluation_knows_what_it_measured(home, tmp_path):
    found = evaluate(home / "half", text_of(home), EVALUATE, against=home / "base")
    manifest = read_manifest(home / "half")
    assert (found.model.id, found.against.id) == (manifest.id, manifest.parent)
    found.write(tmp_path / "report.json")
    content = json.loads((tmp_path / "report.json").read_text())
    assert Report.model_validate(content).id == content["id"] == found.id
    content["provenance"]["created"] = "2001-01-01T00:00:00+00:00"
    assert Report.model_validate(content).id == found.id
    content["model"]["metrics"][0]["value"] += 1
    assert Report.model_validate(content).id != found.id
    flip(home / "half" / "model.safetensors")
    other = evaluate(home / "half", text_of(home), EVALUATE)
    assert other.model.id not in (None, manifest.id)


def test_a_check_knows_what_it_measured(home):
    config = CheckConfig(
        model=str(home / "half"),
        data=str(home / "text.txt"),
        against=str(home / "base"),
        limits=("perplexity <= 900 %",),
        seq_len=16,
    )
    found = check(config)
    manifest = read_manifest(home / "half")
    assert (found.measured, found.measured_against) == (manifest.id, manifest.parent)
    content = json.loads(found.model_dump_json())
    assert content["id"] == found.id
    for name, value, same in (("judge_s", 9.0, True), ("verdict", "broken", False)):
        edited = CheckReport.model_validate({**content, name: value})
        assert (edited.id == found.id) is same


# In a report


@pytest.fixture(scope="module")
def measured(made):
    """Evaluations of both results."""
    return {
        name: evaluate(made / name, text_of(made), EVALUATE, against=made / "base")
        for name in ("half", "most")
    }


def scattered(made, measured, place):
    """Two results of the same name, and their evaluations in the folder of the other."""
    for name, other in (("half", "most"), ("most", "half")):
        shutil.copytree(made / name, place / name / "out")
        measured[name].write(place / other / "report.json")
    return [place / "half", place / "most"]


def perplexities(runs):
    return [[e.model.metrics[0].value for e in run.evaluations] for run in runs]


def test_results_are_paired_with_their_evaluations_whatever_they_are_called(
    made, measured, tmp_path
):
    places = scattered(made, measured, tmp_path)
    wanted = [[measured[name].model.metrics[0].value] for name in ("half", "most")]
    assert wanted[0] != wanted[1]
    runs = report(places, tmp_path / "a.html").runs
    assert perplexities(runs) == wanted
    assert [run.evaluation is not None for run in runs] == [True, True]
    # one digit of an id, and the evaluation is another's
    file = places[0] / "report.json"
    edit(file, lambda r: r["model"].update(id=r["model"]["id"].translate({48: "1", 49: "0"})))
    left_out = "leaves out what belongs to none of its results: '.*half/report.json'"
    with pytest.warns(HeadpruneWarning, match=left_out):
        runs = report(places, tmp_path / "b.html").runs
    assert perplexities(runs) == [wanted[0], []]
    # and where the files were not at hand, nobody knows
    edit(file, lambda r: r["model"].pop("id"))
    with pytest.warns(HeadpruneWarning, match=left_out):
        runs = report(places, tmp_path / "c.html").runs
    assert perplexities(runs) == [wanted[0], []]


def test_scores_belong_to_what_they_chose(home, tmp_path):
    score(
        home / "base",
        tmp_path / "other",
        SMALL.model_copy(update={"seed": 1}).part(ScoreConfig, criterion=["magnitude"]),
    )
    left_out = "leaves out what belongs to none of its results: '.*other'"
    with pytest.warns(HeadpruneWarning, match=left_out):
        (run,) = report([home / "half", tmp_path / "other"], tmp_path / "a.html").runs
    assert run.head_map.evidence is None
    assert f"chosen by magnitude (scores {read_scores(home / 'scores').id[:12]})" in run.summary
    places = [home / "half", tmp_path / "other", home / "scores"]
    with pytest.warns(HeadpruneWarning, match=left_out):
        (run,) = report(places, tmp_path / "b.html").runs
    assert run.head_map.evidence == "score magnitude"


def test_the_page_tells_ids_and_the_command(home, tmp_path):
    provenance = {"command": "prune", "options": {"keep": 0.5, "layout": "ragged", "plan": None}}
    edit(home / "half" / "headprune.json", lambda m: m.update(provenance=provenance))
    manifest = read_manifest(home / "half")
    page = report([home / "half"], tmp_path / "page.html").output.read_text()
    for told in (manifest.id, manifest.parent, "prune, keep 0.5, layout ragged"):
        assert str(told) in page


# Damaged ones


def test_verify_tells_when_the_record_was_edited(home):
    assert verify(home / "half").passed
    edit(home / "half" / "headprune.json", lambda m: m["done"]["evidence"].update(keep=0.75))
    hashes = verify(home / "half").checks[0]
    assert not hashes.passed
    assert "headprune.json was changed" in hashes.found


def test_verify_tells_a_refit_from_trained_weights(home, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"model.layers.0.self_attn": [0, 1]}))
    options = {"refit": text_of(home), "calibration": SMALL}
    prune(home / "base", tmp_path / "refitted", CutRequest(plan=plan), **options)
    told = str(verify(tmp_path / "refitted", against=home / "base").not_run)
    assert "its output projections were refitted on" in told and "trained" not in told
    tiny.save(tiny.model("gpt2"), tmp_path / "stranger")
    with pytest.raises(PlanError, match=r"was not made from this model, .* but from 'base' \("):
        verify(tmp_path / "refitted", against=tmp_path / "stranger")
    with pytest.raises(CheckpointError, match="nowhere"):
        verify(tmp_path / "refitted", against=tmp_path / "nowhere")
    config = TrainGatesConfig(
        target_heads=0.5, steps=2, batch_size=2, seq_len=16, train="attention"
    )
    train_gates(home / "base", text_of(home), tmp_path / "gates", config)
    prune(home / "base", tmp_path / "trained", CutRequest(gates=tmp_path / "gates"))
    told = str(verify(tmp_path / "trained", against=home / "base").not_run)
    assert "its weights came with its gates" in told and "refitted on" not in told
    assert verify(home / "half", against=home / "base").not_run is None
