"""Plans for several devices: in every layer they share the query heads and the KV heads."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune
from headprune.config import LayoutOption
from headprune.errors import PlanError
from headprune.model.attention import attention_of
from headprune.planning.allocation import PerModule, allocate
from headprune.planning.choice import equal_shares
from headprune.planning.constraints import constraints_of
from headprune.planning.kv_heads import choose
from headprune.tensors.units import Unit
from tests import tiny
from tests.cutting import uneven_plan
from tests.test_cli import run
from tests.test_targets import evenly, kept, saved, scored, ways


@pytest.mark.parametrize(("heads", "multiple"), [(None, 4), (6, 2), (9, 3)])
def test_the_best_multiples_are_found(heads: int | None, multiple: int) -> None:
    attentions = attention_of(tiny.model("llama-mha"))[:2]  # 6 heads each
    scores = torch.rand(12, generator=torch.Generator().manual_seed(1))
    per_module = PerModule(least=[1, 0], multiple=multiple)
    found = allocate(attentions, Unit.HEAD, scores.tolist(), heads, per_module)

    def fits(some: tuple[int, ...]) -> bool:
        first, second = sum(at < 6 for at in some), sum(at >= 6 for at in some)
        shared = first % multiple == second % multiple == 0
        return first > 0 and shared and heads in (None, len(some))

    subsets = (s for n in range(13) for s in itertools.combinations(range(12), n))
    best = max((s for s in subsets if fits(s)), key=lambda s: float(scores[[*s]].sum()))
    assert sorted(found) == list(best)
    free = allocate(attentions, Unit.HEAD, scores.tolist(), heads, PerModule(least=[1, 0]))
    assert not fits(tuple(free))


@pytest.mark.parametrize(
    ("case", "devices", "keep", "counts"),
    [
        ("llama-mha", 2, 16, {0, 2, 4, 6}),
        ("llama-mha", 2, 17, {0, 2, 4, 6}),
        ("llama-mha", 4, 12, {0, 4}),
        ("llama-gqa", 2, 12, {0, 4}),  # 2 of 3 KV heads, with 2 queries each
        ("llama-gqa", 3, 12, {0, 6}),
    ],
)
@pytest.mark.parametrize("by", ["plan", "prune"])
def test_devices_share_what_is_chosen(
    by: str, case: str, devices: int, keep: int, counts: set[int], tmp_path: Path
) -> None:
    model = saved(tmp_path, case)
    asked: dict[str, Any] = {"scores": scored(model), "keep": keep, "tensor_parallel": devices}
    if by == "plan":
        planned = headprune.plan(model, **asked)
        plan = planned.plan
        assert planned.kept_of_free is not None and planned.kept_of_free <= 1.1
    else:
        plan = headprune.prune(model, dry_run=True, **asked).plan
    assert set(kept(plan)) <= counts
    assert sum(kept(plan)) == keep + keep % 2  # the nearest, and of two as near the larger
    asked["tensor_parallel"] = 1
    free = headprune.plan(model, **asked) if by == "plan" else None
    assert free is None or free.kept_of_free is None


def test_gates_are_chosen_among_alike(tmp_path: Path) -> None:
    """What training kept comes first, and its order is not lost."""
    model, text = saved(tmp_path, "llama-mha"), tmp_path / "t.txt"
    text.write_text(tiny.text(4_000))
    few = {"steps": 2, "seq_len": 16, "batch_size": 2}
    headprune.train_gates(model, text, tmp_path / "g", target_heads=16, **few)
    whole = headprune.prune(model, gates=tmp_path / "g", dry_run=True).plan
    two = headprune.prune(model, gates=tmp_path / "g", tensor_parallel=2, dry_run=True).plan
    assert sum(kept(two)) == 16 and all(count % 2 == 0 for count in kept(two))
    for path, part in two.attentions.items():
        both, least = set(part.keep) & set(whole.attentions[path].keep), len(part.keep)
        assert len(both) == min(least, len(whole.attentions[path].keep))


def test_with_an_engine_layers_keep_a_head_for_every_device(tmp_path: Path) -> None:
    model = saved(tmp_path, worthless=(0, 1))
    asked = {"scores": scored(model), "keep": 12, "dry_run": True, "tensor_parallel": 2}
    assert kept(headprune.prune(model, targets=["llama.cpp"], **asked).plan)[0] == 4
    assert kept(headprune.prune(model, targets=["vllm"], **asked).plan) == [4, 4, 4, 4]
    assert kept(headprune.prune(model, layout="uniform", **asked).plan) == [4, 4, 4, 4]


def test_the_dry_run_shows_the_price_of_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = saved(tmp_path, "llama-mha", worthless=(0, 1))
    line = ("prune", model, "--scores", scored(model), "--keep", "11", "--dry-run")
    code, out, err = run(capsys, *line, "--json", "--tensor-parallel", "3")
    assert code == 0, err
    found = json.loads(out)
    costs = {cost["shape"]: cost for cost in found["tensor_parallel"]}
    assert list(costs) == ["2", "3", "4"]
    free = next(cost for cost in found["shapes"] if cost["shape"] == "per-layer")
    assert costs["3"]["heads"] == 12 and costs["2"]["heads"] == 12 and free["heads"] == 11
    assert costs["4"]["evidence"] < costs["2"]["evidence"]
    assert {cost["heads"] for cost in found["engines"] if cost["heads"]} == {12}
    code, out, err = run(capsys, *line)
    assert code == 0 and "--tensor-parallel" in out, err


def test_what_devices_cannot_share_is_refused_when_the_plan_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, plan = saved(tmp_path), tmp_path / "plan.json"
    out = ("--output", tmp_path / "out")
    given = uneven_plan(headprune.from_pretrained(model)).model_copy(update={"model": None})
    given.write(plan)
    code, _, err = run(capsys, "prune", model, "--plan", plan, *out, "--tensor-parallel", "2")
    said = " ".join(err.split())
    assert code == 2 and "--tensor-parallel 2: the plan leaves 'model.layers." in said
    code, _, err = run(capsys, "prune", model, "--plan", plan, *out, "--tensor-parallel", "4")
    assert code == 2 and "this model's have 3 at most" in " ".join(err.split())
    convert = ("convert-gqa", model, *out, "--tensor-parallel", "3")
    code, _, err = run(capsys, *convert, "--kv-heads", "1")
    assert code == 2 and "cannot share the 1 KV heads" in " ".join(err.split())
    code, _, err = run(capsys, *convert[:-1], "2", "--kv-budget", "0.7")
    assert code == 2 and "share no number that they merge to" in " ".join(err.split())
    assert not (tmp_path / "out").exists()
    evenly(headprune.from_pretrained(model)).model_copy(update={"model": None}).write(plan)
    with pytest.raises(PlanError, match="tensor_parallel 2: .*2 query and 1 KV heads"):
        headprune.prune(model, plan=plan, dry_run=True, tensor_parallel=2)


def test_kv_heads_are_merged_to_what_devices_share(tmp_path: Path) -> None:
    model, text = saved(tmp_path, "llama-mha"), tmp_path / "t.txt"  # 6 KV heads
    headprune.convert_gqa(model, tmp_path / "out", kv_budget=0.4, tensor_parallel=2)
    assert {a.kv_heads for a in headprune.inspect(tmp_path / "out").attentions} == {2}
    text.write_text(tiny.text(4_000))
    asked = {"kv_budget": 0.5, "seq_len": 16, "calibration_tokens": 256, "dry_run": True}
    found = headprune.convert_gqa(model, calibrate=text, tensor_parallel=2, **asked)
    parts = found.plan.attentions.values()
    assert all(_kv_heads(part) % 2 == 0 for part in parts) and found.kv_heads == (24, 12)
    assert list(found.devices) == ["2", "4"] and found.devices["2"] == found.planned.cost
    assert found.devices["2"] >= found.free


@pytest.mark.parametrize("budget", [0.1, 0.34])
def test_a_budget_below_what_devices_share_is_refused(budget: float, tmp_path: Path) -> None:
    model = saved(tmp_path, "llama-mha")  # 6 KV heads: two devices share 2, three share 3
    asked = {"kv_budget": budget, "output": tmp_path / "out"}
    with pytest.raises(PlanError, match=r"least is 0\.500"):
        headprune.convert_gqa(model, tensor_parallel=3, **asked)
    with pytest.raises(PlanError, match=r"no equal number .* the least is 0\.500"):
        headprune.convert_gqa(model, tensor_parallel=3, layout="uniform", **asked)
    assert not (tmp_path / "out").exists()


def test_equal_shares_leave_no_layer_out_unasked() -> None:
    attentions = attention_of(tiny.model("llama-gqa"))  # 4 layers of 6 heads in 3 groups
    assert equal_shares(attentions, Unit.KV_GROUP, 16, 1, 2) == [4, 4, 4, 4]
    with pytest.raises(PlanError, match="tensor-parallel 3 leaves .* no heads"):
        equal_shares(attentions, Unit.KV_GROUP, 12, 0, 3)


def _kv_heads(part: Any) -> int:
    return len(part.groups) if part.groups is not None else len(part.keep)


def test_ways_that_devices_cannot_share_are_left_out() -> None:
    net = tiny.model("llama-gqa")
    both = {str(n): ways(cheap) for n, cheap in enumerate((0, 1, 2, 3))}
    for devices, said in ((1, {"2 kept", "1 kept", "no attention", "2 merged to 1"}), (2, None)):
        constraints = constraints_of(net, LayoutOption.PER_LAYER, (), devices)
        found = {way.said for way in choose(both, 4, "x", constraints).chosen.values()}
        assert found == (said or {"2 kept", "no attention"})


@pytest.mark.slow
def test_every_candidate_of_compress_is_one_that_devices_share(tmp_path: Path) -> None:
    model, text = saved(tmp_path), tmp_path / "t.txt"
    text.write_text(tiny.text(3_000))
    small = {"seq_len": 16, "calibration_tokens": 256, "held_out_tokens": 128}
    done = headprune.compress(
        model, [text], tmp_path / "out", keep=0.67, tensor_parallel=2, **small
    )
    assert not done.choice.failed
    assert all(a.kv_heads % 2 == 0 for a in headprune.inspect(tmp_path / "out").attentions)
