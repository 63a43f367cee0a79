"""What releases wrote is read by this one: a file of every format, and a damaged one beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune
from headprune.errors import HeadpruneError
from headprune.model.attention import attention_of
from headprune.proof.verify import verify
from headprune.regression.baseline import read_baseline
from headprune.reports.report import report
from headprune.schemas.gates import read_gates, read_metadata
from headprune.schemas.manifest import read_manifest
from headprune.schemas.plan import Shape, read_plan
from headprune.schemas.records import Pruning
from headprune.schemas.runs import read_run
from headprune.schemas.scores import read_scores
from headprune.tensors.units import Unit

pytestmark = pytest.mark.quick

GOLDEN = Path(__file__).with_name("golden")
RELEASES = sorted(path for path in GOLDEN.iterdir() if (path / "plan.json").is_file())
LAYERS = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


@pytest.fixture(params=RELEASES, ids=lambda path: path.name)
def release(request: pytest.FixtureRequest) -> Path:
    """The files of one release; all wrote the same."""
    folder: Path = request.param
    return folder


def gates(folder: Path) -> Any:
    return read_gates(folder / "gates", read_metadata(folder / "gates").model)


def test_a_plan(release: Path) -> None:
    plan = read_plan(release / "plan.json", {})
    assert plan.unit is Unit.KV_GROUP
    assert plan.model is not None and plan.model.model_type == "llama"
    kept = {path: part.keep for path, part in plan.attentions.items()}
    assert kept == {LAYERS[0]: (4, 5), LAYERS[1]: (0, 1, 4, 5)}


def test_gates(release: Path) -> None:
    trained = gates(release)
    assert trained.metadata.modules == tuple(LAYERS)
    assert (trained.metadata.query_heads, trained.metadata.kept_heads) == (12, 6)
    assert trained.metadata.method == "l0"
    names = trained.weights
    assert names and all(any(name.startswith(layer) for layer in LAYERS) for name in names)


def test_scores(release: Path) -> None:
    found = read_scores(release / "scores")
    assert found.metadata.unit is Unit.KV_GROUP
    assert set(found.scores) == {"fisher", "random"}
    assert all(score.shape == (6,) and score.isfinite().all() for score in found.scores.values())
    assert (found.scores["fisher"] > 0).all()


def test_a_result(release: Path) -> None:
    manifest = read_manifest(release / "result")
    assert manifest.shape is Shape.NATIVE
    assert manifest.query_heads == (12, 8)
    assert manifest.proof is not None and manifest.proof.passed
    assert verify(release / "result").passed
    model = headprune.from_pretrained(release / "result")
    assert [a.query_heads for a in attention_of(model)] == [4, 4]
    assert model(torch.tensor([[5, 6, 7]])).logits.isfinite().all()


def test_a_report_of_evaluate(release: Path, tmp_path: Path) -> None:
    report([release / "report.json"], tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "Measure result against model on text.txt" in page
    assert "| perplexity | 77.7751 |" in page


def test_parts_know_each_other(release: Path, tmp_path: Path) -> None:
    manifest = read_manifest(release / "result")
    assert isinstance(manifest.done, Pruning) and manifest.done.trained_weights
    assert manifest.changed_weights == "its weights came with its gates, trained or refitted"
    places = [release / name for name in ("result", "gates", "report.json")]
    runs = report(places, tmp_path / "page.md").runs
    told = " ".join(run.asked for run in runs)
    if release.name == "0.1":  # which knew of no ids
        assert manifest.evidence is None
        assert [run.folder for run in runs] == places
        assert told.count("unknown: an earlier headprune wrote it") == 2
        return
    (run,) = runs
    assert len(run.evaluations) == len(run.histories) == 1
    assert manifest.evidence is not None and manifest.evidence.id == gates(release).id
    assert manifest.id == manifest.digest()
    assert read_scores(release / "scores").metadata.id == read_scores(release / "scores").id
    assert "unknown" not in told


def test_the_record_of_a_run(release: Path) -> None:
    record = read_run(release)
    assert record is not None and record.name == "job"
    assert {name: step.step for name, step in record.steps.items()} == {
        "train-gates": "train-gates",
        "prune": "prune",
    }
    assert record.steps["prune"].seconds is not None


def test_a_baseline(release: Path) -> None:
    baseline = read_baseline(release / "baseline.json")
    assert baseline.limits == ("perplexity <= +90 %",)
    assert baseline.subject.layers == 2
    assert 70 < baseline.metrics["perplexity"] < 85
    assert baseline.structure["query_heads"] == 8


READERS: dict[str, Callable[[Path], object]] = {
    "plan.json": lambda folder: read_plan(folder / "plan.json", {}),
    "gates": gates,
    "scores": lambda folder: read_scores(folder / "scores"),
    "headprune.json": lambda folder: read_manifest(folder / "result"),
    "report.json": lambda folder: report([folder / "report.json"], folder / "page.md"),
    "run.json": read_run,
    "baseline.json": lambda folder: read_baseline(folder / "baseline.json"),
}


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_one_is_refused(name: str, release: Path) -> None:
    with pytest.raises(HeadpruneError) as told:
        READERS[name](release / "damaged")
    stem = name.partition(".")[0]
    assert stem in str(told.value) and "\n" not in str(told.value)
    assert not (release / "damaged" / "page.md").exists()


def test_they_are_small() -> None:
    for folder in RELEASES:
        assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 200_000
