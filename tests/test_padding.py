"""--layout padded: zero heads in the folder itself, proven as every cut is."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import headprune
from headprune.errors import PlanError
from headprune.formats.regularise import regularise
from headprune.formats.source import open_source
from headprune.model.attention import attention_of
from headprune.model.gating import fixed, gated
from headprune.schemas.manifest import read_manifest
from headprune.schemas.plan import Plan, read_plan
from tests import tiny
from tests.cutting import ragged_plan, uneven_plan
from tests.marks import slow_unless
from tests.test_cli import run
from tests.test_targets import saved, scored

IDS = torch.randint(0, tiny.VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))


def foreign(plan: Plan) -> Plan:
    return plan.model_copy(update={"model": None})


def holey(model: PreTrainedModel, gates: bool) -> Plan:
    """Ragged groups, gates that are not 1, and a layer without heads."""
    parts = dict(uneven_plan(model, 1).attentions)
    first = attention_of(model)[0]
    if first.query_heads > first.kv_heads:
        some = ragged_plan(model).attentions[first.path].keep[:-2]
        factors = tuple(1 - 0.05 * head for head in some)
        parts[first.path] = parts[first.path].model_copy(update={"keep": some, "scale": factors})
    if not gates:
        parts = {path: part.model_copy(update={"scale": None}) for path, part in parts.items()}
    return Plan(unit="head", attentions=parts)


def gates_of(plan: Plan) -> list[torch.Tensor]:
    """Per module, the gate of every head."""
    found = []
    for part in plan.attentions.values():
        gate = torch.zeros(part.query_heads)
        gate[[*part.keep]] = torch.tensor(part.scale or (1.0,) * len(part.keep))
        found.append(gate)
    return found


# separate and fused projections, biases, norms and sinks per head, norms of full width, tied
# weights, a family that knows no ragged groups, attention that is not causal
CASES = ("llama-gqa", "qwen3", "gpt2", "gpt_neox", "phi3", "falcon-new", "cohere", "gpt_oss")


@pytest.mark.parametrize(
    ("case", "dtype"),
    slow_unless(
        lambda case, dtype: dtype == "float32" or case == "llama-gqa",
        product([*CASES, "olmo2", "bert-mlm"], ["float32", "bfloat16"]),
    ),
)
def test_zero_heads_compute_nothing(case: str, dtype: str, tmp_path: Path) -> None:
    model = tiny.save(tiny.model(case).to(getattr(torch, dtype)), tmp_path / "m")
    original = headprune.from_pretrained(model, dtype="float32")
    plan = holey(original, gates=dtype == "float32")
    done = headprune.prune(model, tmp_path / "out", plan=plan, layout="padded")
    assert "numbers per token" in done.warnings[-1] and done.manifest.proof.passed
    net = headprune.from_pretrained(tmp_path / "out", dtype="float32")
    heads = attention_of(net)
    assert all(a.query_heads and len(set(a.group_sizes)) == 1 for a in heads)
    assert sum(a.query_heads for a in heads) > plan.kept_heads
    with torch.no_grad():
        with gated(attention_of(original), fixed(gates_of(plan))):
            wanted = original(IDS).logits
        scale = wanted.abs().max()
        assert (wanted - net(IDS).logits).abs().max() < 1e-5 * scale
        weight = heads[1].output_projection.weight
        assert not weight.abs().max()
        weight.normal_()  # a zero head that is none
        assert (wanted - net(IDS).logits).abs().max() > 1e-3 * scale
    if case in ("llama-gqa", "qwen3"):
        source = open_source(tmp_path / "out")
        assert regularise(source) == (source, ())


def test_an_export_says_the_same_of_zero_heads(tmp_path: Path) -> None:
    model = saved(tmp_path)
    plan = holey(headprune.from_pretrained(model), gates=True)
    headprune.prune(model, tmp_path / "bare", plan=plan, layout="ragged")
    done = headprune.prune(model, tmp_path / "out", plan=plan, layout="padded")
    assert regularise(open_source(tmp_path / "bare"))[1] == done.warnings
    assert len(done.warnings) == 2


def test_the_cache_is_what_was_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, plan = saved(tmp_path), tmp_path / "plan.json"
    foreign(uneven_plan(headprune.from_pretrained(model), 1)).write(plan)
    line = ("prune", model, "--plan", plan, "--layout", "padded")
    code, out, err = run(capsys, *line, "--dry-run")
    assert code == 0 and "□" in out, err
    assert "Layer 1 without heads: zero heads" in " ".join(err.split())
    code, out, err = run(capsys, *line, tmp_path / "out", "--json")
    assert code == 0, err
    found = json.loads(out)
    head_dim = attention_of(headprune.from_pretrained(model))[0].head_dim
    assert f"holds {2 * head_dim:,} numbers per token" in found["warnings"][-1]
    bare = headprune.prune(model, plan=plan, dry_run=True)
    assert found["kv_heads"][1] == bare.kv_heads[1] + 1
    card = (tmp_path / "out" / "README.md").read_text()
    assert "□ is a zero head" in card and "vllm serve" in card and "--to vllm" not in card


def test_by_scores_with_a_refit(tmp_path: Path) -> None:
    model, text = saved(tmp_path, worthless=(1,)), tmp_path / "t.txt"
    text.write_text(tiny.text(4_000))
    asked = {"scores": scored(model), "keep": 16, "layout": "padded"}
    fit = {"refit": text, "calibration_tokens": 256, "seq_len": 16}
    done = headprune.prune(model, tmp_path / "out", **asked, **fit)
    assert done.manifest.refit is not None and done.manifest.proof.passed
    layer = read_plan(tmp_path / "out" / "plan.json", {}).attentions["model.layers.1.self_attn"]
    assert layer.scale == (0.0,)
    shown = headprune.prune(model, dry_run=True, **asked)
    costs = {cost.shape: cost for cost in shown.shapes}
    assert costs["padded"].heads == costs["per-layer"].heads == 16
    assert costs["padded"].evidence == costs["per-layer"].evidence


def test_a_zero_head_that_is_none_fails_the_proof(tmp_path: Path) -> None:
    model = saved(tmp_path)
    plan = foreign(uneven_plan(headprune.from_pretrained(model), 1))
    headprune.prune(model, tmp_path / "out", plan=plan, layout="padded")
    assert headprune.verify(tmp_path / "out", against=model).passed
    file = tmp_path / "out" / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.self_attn.o_proj.weight"
    save_file({**weights, name: weights[name] + 0.1}, file, metadata={"format": "pt"})
    assert not headprune.verify(tmp_path / "out", against=model).passed


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (uneven_plan, "no ragged groups and no layer without heads"),
        (ragged_plan, "the result would be no smaller"),
    ],
)
def test_what_gains_nothing_is_refused(plan: object, message: str, tmp_path: Path) -> None:
    model = saved(tmp_path)
    given = foreign(plan(headprune.from_pretrained(model)))  # type: ignore[operator]
    with pytest.raises(PlanError, match=f"layout padded: .*{message}"):
        headprune.prune(model, tmp_path / "out", plan=given, layout="padded")
    assert not (tmp_path / "out").exists()


def test_where_no_head_is_left_to_be_a_zero_head(tmp_path: Path) -> None:
    model = saved(tmp_path)
    plan = foreign(uneven_plan(headprune.from_pretrained(model), 1))
    headprune.prune(model, tmp_path / "cut", plan=plan)
    whole = headprune.prune(tmp_path / "cut", plan=keep_all(tmp_path / "cut"), dry_run=True).plan
    with pytest.raises(PlanError, match=r"layers\.1\.self_attn' lost its heads in an earlier cut"):
        headprune.prune(tmp_path / "cut", plan=whole, layout="padded", dry_run=True)
    with pytest.raises(PlanError, match="for removed heads"):
        headprune.convert_gqa(model, tmp_path / "gqa", kv_heads=1, layout="padded")
    assert not (tmp_path / "gqa").exists()
    assert read_manifest(tmp_path / "cut").uneven


def keep_all(folder: Path) -> Path:
    """A plan file that removes nothing."""
    file = folder.with_suffix(".json")
    file.write_text("{}")
    return file
