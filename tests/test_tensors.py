"""The pure layer: gates, units, selection, index maps."""

import itertools
import math
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headprune.tensors import hard_concrete
from headprune.tensors.index_maps import IndexMap, projection_slices
from headprune.tensors.selection import attainable, keep_best
from headprune.tensors.units import Unit, members

pytestmark = pytest.mark.quick


def test_open_probability_is_the_share_of_draws_that_are_not_zero():
    log_alpha = torch.tensor([-3.0, -1.0, 0.0, 2.0])
    draws = hard_concrete.sample(log_alpha, 2 / 3, draws=200_000)
    expected = hard_concrete.open_probability(log_alpha, 2 / 3)
    torch.testing.assert_close((draws > 0).float().mean(0), expected, atol=5e-3, rtol=0)
    wrong = hard_concrete.open_probability(log_alpha, 0.33)
    assert ((draws > 0).float().mean(0) - wrong).abs().max() > 5e-2


def test_draws_of_a_gate_are_spread_evenly():
    temperature = 2 / 3
    shift = temperature * math.log(-hard_concrete.GAMMA / hard_concrete.ZETA)
    log_alpha = torch.full((500,), math.log(3) + shift)  # open with probability 3/4
    spread = hard_concrete.sample(log_alpha, temperature, draws=4) > 0
    assert (spread.sum(0) == 3).all()
    assert 0 < (spread[0] & spread[1]).float().mean() < 0.75  # which of the four is chance
    alone = torch.cat([hard_concrete.sample(log_alpha, temperature, 1) > 0 for _ in range(4)])
    assert not (alone.sum(0) == 3).all()


def test_voitas_start_is_half_open():
    # FACTS of the paper's code: beta 0.33, log_alpha 0 -> P(open) about 0.69
    assert hard_concrete.open_probability(torch.zeros(1), 0.33).item() == pytest.approx(0.69, 0.01)


def test_gates_lie_in_the_closed_interval_and_reach_both_ends():
    draws = hard_concrete.sample(torch.zeros(1), 2 / 3, draws=10_000)
    assert draws.min() == 0 and draws.max() == 1
    assert hard_concrete.value(torch.tensor([-9.0, 9.0])).tolist() == [0.0, 1.0]


def test_the_gradient_of_a_draw_reaches_log_alpha():
    log_alpha = torch.zeros(5, requires_grad=True)
    hard_concrete.sample(log_alpha, 2 / 3, draws=64).sum().backward()
    assert log_alpha.grad is not None and (log_alpha.grad > 0).all()


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        (Unit.HEAD, [[0], [1], [2], [3], [4], [5]]),
        (Unit.KV_GROUP, [[0, 1, 2], [3, 4, 5]]),
        (Unit.QUERY_SLOT, [[0, 3], [1, 4], [2, 5]]),
    ],
)
def test_units_of_six_heads_on_two(unit, expected):
    assert members(unit, [3, 3]) == expected


@given(st.sampled_from(Unit), st.integers(1, 6), st.integers(1, 6))
def test_units_partition_the_heads(unit, group, kv_heads):
    heads = members(unit, [group] * kv_heads)
    assert sorted(itertools.chain(*heads)) == list(range(group * kv_heads))


@given(st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=12), st.data())
def test_selection_hits_the_budget_and_keeps_the_best(scores, data):
    budget = data.draw(st.integers(0, len(scores)))
    kept = keep_best(scores, [1] * len(scores), budget)
    assert len(kept) == budget
    gone = [scores[i] for i in range(len(scores)) if i not in kept]
    assert not kept or not gone or min(scores[i] for i in kept) >= max(gone)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=9), st.data())
def test_selection_with_unequal_sizes_is_exact(sizes, data):
    budget = data.draw(st.integers(0, sum(sizes)))
    scores = data.draw(st.lists(st.floats(-1, 1), min_size=len(sizes), max_size=len(sizes)))
    if budget in attainable(sizes):
        assert sum(sizes[i] for i in keep_best(scores, sizes, budget)) == budget
    else:
        with pytest.raises(ValueError, match=f"exactly {budget} heads"):
            keep_best(scores, sizes, budget)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), max_size=9), st.data())
def test_selection_is_that_of_all_subsets(sizes, data):
    scores = [float(data.draw(st.integers(-2, 2))) for _ in sizes]
    units = range(len(sizes))
    subsets = [s for count in range(len(sizes) + 1) for s in itertools.combinations(units, count)]
    totals = {sum(sizes[unit] for unit in subset) for subset in subsets}
    assert attainable(sizes) == totals
    budget = data.draw(st.sampled_from(sorted(totals)))
    ranked = sorted(units, key=lambda unit: (-scores[unit], unit))
    hits = [subset for subset in subsets if sum(sizes[unit] for unit in subset) == budget]
    best = max(hits, key=lambda subset: [unit in subset for unit in ranked])
    assert keep_best(scores, sizes, budget) == list(best)


def test_thousands_of_units_are_chosen_in_little_memory():
    sizes = [1 + unit % 2 for unit in range(4000)]
    tracemalloc.start()
    kept = keep_best([0.0] * len(sizes), sizes, 3001)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(sizes[unit] for unit in kept) == 3001
    assert peak < 20e6


def test_ties_go_to_the_lower_index():
    assert keep_best([1.0, 1.0, 1.0, 1.0], [1] * 4, 2) == [0, 1]


def test_budgets_at_the_ends():
    scores, sizes = [0.3, 0.1, 0.2], [1, 1, 1]
    assert keep_best(scores, sizes, 0) == []  # a peer's negative index removes all for 0
    assert keep_best(scores, sizes, 3) == [0, 1, 2]
    assert keep_best(scores, sizes, 2) == [0, 2]


def test_head_slices_are_whole_heads_in_order():
    rows = projection_slices("k", False, {"k": [2, 0]}, {"k": 3}, 3)
    assert rows.tolist() == [6, 7, 8, 0, 1, 2]


@pytest.mark.parametrize("interleaved", [False, True])
def test_fused_projection_slices_match_a_split_by_hand(interleaved):
    heads, head_dim = 4, 3
    q, k, v = torch.arange(3 * heads * head_dim).view(3, heads, head_dim)
    fused = torch.stack([q, k, v], 1).flatten() if interleaved else torch.cat([q, k, v]).flatten()
    keep = [1, 3]
    kept = dict.fromkeys("qkv", keep)
    total = dict.fromkeys("qkv", heads)
    rows = projection_slices("qkv", interleaved, kept, total, head_dim, [1, 1])
    parts = [q[keep], k[keep], v[keep]]
    by_hand = torch.stack(parts, 1).flatten() if interleaved else torch.cat(parts).flatten()
    assert fused[rows].tolist() == by_hand.tolist()
    wrong = projection_slices("qkv", not interleaved, kept, total, head_dim, [1, 1])
    assert fused[wrong].tolist() != by_hand.tolist()


def test_heads_that_share_one_kv_head_move_beside_it():
    # [q0 q1 k0 v0 | q2 q3 k1 v1]; both groups share the second KV head
    kept = {"q": [3, 0, 1, 2], "k": [1], "v": [1]}
    rows = projection_slices("qkv", True, kept, {"q": 4, "k": 2, "v": 2}, 1, [4])
    assert rows.tolist() == [5, 0, 1, 4, 6, 7]


def test_an_index_map_scales_what_it_keeps_and_keeps_the_dtype():
    weight = torch.randn(3, 4, dtype=torch.bfloat16)
    index_map = IndexMap("w", 1, torch.tensor([3, 1]), torch.tensor([0.5, 2.0]))
    got = index_map.apply(weight)
    assert got.dtype is torch.bfloat16
    expected = torch.stack([weight[:, 3] * 0.5, weight[:, 1] * 2], 1)
    torch.testing.assert_close(got, expected)
