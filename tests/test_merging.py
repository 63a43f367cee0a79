"""Merges, groupings and budgets, on weights alone."""

import itertools
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headprune.errors import DataError, PlanError
from headprune.surgery.merges import MERGES, NEEDS_CALIBRATION, HeadWeights, MergeContext
from headprune.surgery.merges.grouping import EXACT, adjacent, lowrank_cost, partitions, similar
from headprune.surgery.merges.lowrank import conjugate_gradients
from headprune.surgery.merges.spec import MergeActivations, project
from headprune.tensors.lowrank import shared_key, shared_value
from headprune.tensors.rotary import RotaryPairs, Rotation

WITHOUT_TEXT = [name for name in MERGES if name not in NEEDS_CALIBRATION]
PAIRS = {
    "none": None,
    "halves": RotaryPairs.halves(4, 4),
    "interleaved": RotaryPairs.interleaved(4, 4),
    "partial": RotaryPairs.halves(2, 4),
}


def heads(kv=6, per_kv=1, width=4, hidden=12, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    queries = kv * per_kv
    return HeadWeights(
        q=draw(queries, width, hidden),
        k=draw(kv, width, hidden),
        v=draw(kv, width, hidden),
        o=draw(queries, hidden, width),
        group_sizes=(per_kv,) * kv,
        q_bias=draw(queries, width),
        k_bias=draw(kv, width),
        v_bias=draw(kv, width),
    )


def rotation(pairs, length=5):
    if pairs is None:
        return None
    angles = torch.arange(length)[:, None] * (1.0 + torch.arange(len(pairs.first))) / 3
    return Rotation(pairs, angles.cos().double(), angles.sin().double())


def computed(h, pairs, seed=1):
    """Scores at five positions, and every head's output for a value read as it is."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, h.q.shape[2], generator=generator, dtype=torch.float64)
    x = torch.cat([x, torch.ones(5, 1, dtype=torch.float64)], 1)
    turn = rotation(pairs)
    q, k, v = (torch.einsum("hdi,ti->htd", h.affine(role), x) for role in ("q", "k", "v"))
    if turn is not None:
        q, k = turn.rotate(q), turn.rotate(k)
    return q @ k[h.owners].mT, v[h.owners] @ h.o.mT


def alike(h, groups):
    """The same heads with the first K and V of every group in all of it."""
    k, v = h.affine("k").clone(), h.affine("v").clone()
    for group in groups:
        k[list(group)], v[list(group)] = k[group[0]].clone(), v[group[0]].clone()
    return h.with_affine("k", k).with_affine("v", v)


@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("name", WITHOUT_TEXT)
def test_merging_identical_heads_changes_nothing(name, pairs):
    groups = [(0, 3), (1, 4), (2, 5)]
    same, context = alike(heads(per_kv=2), groups), MergeContext(PAIRS[pairs])
    merged = MERGES[name](same, groups, context)
    for before, after in zip(
        computed(same, PAIRS[pairs]), computed(merged, PAIRS[pairs]), strict=True
    ):
        torch.testing.assert_close(before, after)
    other = heads(per_kv=2)  # heads that differ do not survive it
    changed = computed(MERGES[name](other, groups, context), PAIRS[pairs])
    assert not torch.allclose(computed(other, PAIRS[pairs])[0], changed[0])


@pytest.mark.parametrize("name", WITHOUT_TEXT)
def test_merged_heads_of_a_group_are_equal_and_others_are_not(name):
    merged = MERGES[name](heads(), [(0, 2), (1, 3, 4), (5,)], MergeContext())
    assert torch.equal(merged.k[0], merged.k[2])
    assert torch.equal(merged.v[1], merged.v[4])
    assert not torch.equal(merged.k[0], merged.k[1])
    assert torch.equal(merged.k_bias[1], merged.k_bias[3])  # type: ignore[index]


@pytest.mark.parametrize("pairs", PAIRS)
def test_procrustes_undoes_turns_that_queries_can_absorb(pairs):
    group, plan = [(0, 1, 2, 3, 4, 5)], PAIRS[pairs]
    same = alike(heads(), group)
    k, v = same.affine("k").clone(), same.affine("v").clone()
    generator = torch.Generator().manual_seed(3)
    for head in range(1, 6):
        turn = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64))[0]
        v[head] = turn @ v[head]
        if plan is None:
            k[head] = turn @ k[head]
        else:
            phase = torch.polar(torch.ones(()), torch.tensor(0.7 * head)).to(torch.complex128)
            a, b = plan.first, plan.second
            turned_pairs = torch.complex(k[head, a], k[head, b]) * phase
            k[head, a], k[head, b] = turned_pairs.real, turned_pairs.imag
    turned = same.with_affine("k", k).with_affine("v", v)
    merged = MERGES["procrustes"](turned, group, MergeContext(plan))
    for before, after in zip(computed(turned, plan), computed(merged, plan), strict=True):
        torch.testing.assert_close(before, after, rtol=1e-6, atol=1e-6)
    mean = MERGES["mean"](turned, group, MergeContext(plan))
    assert not torch.allclose(computed(turned, plan)[0], computed(mean, plan)[0], rtol=1e-2)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from(list(PAIRS)), st.integers(0, 99))
def test_a_shared_key_that_can_hold_all_heads_is_exact(kv, per_kv, name, seed):
    pairs, generator = PAIRS[name], torch.Generator().manual_seed(seed)
    base = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    k = torch.stack([_absorbable(pairs, generator) @ base for _ in range(kv)])
    q = torch.randn(kv * per_kv, 4, 9, generator=generator, dtype=torch.float64)
    owners = [query // per_kv for query in range(kv * per_kv)]
    joint = k.flatten(0, 1)
    found = shared_key(q @ q.mT, owners, joint @ joint.T, pairs)
    shared, new_q = found.basis @ joint, found.maps @ q
    assert found.lost <= 1e-9 * found.power
    x, turn = torch.randn(5, 9, generator=generator, dtype=torch.float64), rotation(pairs)

    def scores(q, k):
        rows = [torch.einsum("hdi,ti->htd", w, x) for w in (q, k)]
        a, b = rows if turn is None else [turn.rotate(row) for row in rows]
        return a @ b.mT

    wanted = scores(q, k[owners])
    torch.testing.assert_close(scores(new_q, shared[None]), wanted, rtol=1e-6, atol=1e-6)
    if kv > 1:  # one more head that no map leads to
        k[0] = torch.randn(4, 9, generator=generator, dtype=torch.float64)
        joint = k.flatten(0, 1)
        assert shared_key(q @ q.mT, owners, joint @ joint.T, pairs).lost > 1e-4 * found.power


def _absorbable(pairs, generator):
    """A map that queries can absorb: any without rotation; scaled turns of its pairs with one."""
    if pairs is None:
        return torch.randn(4, 4, generator=generator, dtype=torch.float64)
    result = torch.zeros(4, 4, dtype=torch.float64)
    size = (len(pairs.unpaired), len(pairs.unpaired))
    result[pairs.unpaired[:, None], pairs.unpaired] = torch.randn(
        size, generator=generator, dtype=torch.float64
    )
    c, s = torch.randn(2, len(pairs.first), generator=generator, dtype=torch.float64)
    result[pairs.first, pairs.first] = result[pairs.second, pairs.second] = c
    result[pairs.first, pairs.second], result[pairs.second, pairs.first] = -s, s
    return result


@pytest.mark.parametrize("name", ["halves", "interleaved", "partial"])
def test_maps_that_queries_absorb_commute_with_the_rotation(name):
    pairs, h = PAIRS[name], heads()
    turn = rotation(pairs)
    joint = h.k.flatten(0, 1)
    q = torch.randn(6, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def gap(allowed):
        maps = shared_key(h.q @ h.q.mT, list(range(6)), joint @ joint.T, allowed).maps
        after = turn.rotate(q) @ maps.mT
        return float((turn.rotate(q @ maps.mT) - after).abs().max() / after.abs().max())

    assert gap(pairs) < 1e-12
    assert gap(None) > 1e-2  # free of the rotation, it does not


def test_a_shared_value_is_exact_with_rank_enough_and_best_without():
    h = heads(kv=3, width=4, hidden=12)
    base = torch.randn(4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    mixes = torch.randn(3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    joint = (mixes @ base).flatten(0, 1)
    found = shared_value(h.o, [0, 1, 2], joint @ joint.T)
    wanted = h.o @ (mixes @ base)
    got = found.maps @ (found.basis @ joint)
    torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-7)
    joint = h.v.flatten(0, 1)
    found = shared_value(h.o, [0, 1, 2], joint @ joint.T)
    lost = (h.o @ h.v - found.maps @ (found.basis @ joint)).square().sum()
    assert float(lost) == pytest.approx(found.lost, rel=1e-6)
    worse = (h.o @ h.v - h.o @ h.v.mean(0)).square().sum()
    assert 0 < found.lost < float(worse)


def attention(h, queries, keys, rows):
    later = torch.arange(keys.shape[2]) > rows[:, None]
    return (queries @ keys[:, h.owners].mT).masked_fill(later, -torch.inf).softmax(-1)


def seen(h, sequences, length=12, seed=0):
    """What a causal module with these weights does on random sequences."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sequences, length, h.q.shape[2], generator=generator, dtype=torch.float64)
    x = torch.cat([x, torch.ones(sequences, length, 1, dtype=torch.float64)], -1)
    queries, keys = project(x, h.affine("q")), project(x, h.affine("k"))

    def own(q, k, part, rows):
        return attention(h, q, k, rows)

    inputs = dict.fromkeys(("q", "k", "v"), x)
    empty = torch.empty(sequences, length, h.o.shape[1], dtype=torch.float64)
    known = MergeActivations(
        inputs, lambda: (queries, keys), None, 1.0, own, empty, lambda other: read_by(other, x)
    )
    return replace(known, outputs=given_by(h, known))


def read_by(h, x):
    """What enters W_O, of all sequences."""
    q, k, v = (project(x, h.affine(role)) for role in ("q", "k", "v"))
    read = attention(h, q, k, torch.arange(q.shape[2])) @ v[:, h.owners]
    return read.transpose(1, 2).flatten(2)


def given_by(h, known):
    """The outputs of these weights on the inputs of some activations."""
    return read_by(h, known.inputs["q"]) @ h.o.transpose(0, 1).flatten(1).T


def test_windows_that_are_held_out_keep_outputs_from_being_learnt_by_heart(monkeypatch):
    h, group = heads(), [tuple(range(6))]
    h = replace(h, q=h.q / 4, k=h.k / 4)
    fresh = seen(h, 64, seed=1)

    def lost(sequences):
        merged = MERGES["lowrank"](h, group, MergeContext(activations=seen(h, sequences)))
        return float((given_by(merged, fresh) - fresh.outputs).square().sum())

    few, many = lost(4), lost(64)
    assert many < few < 1.5 * many
    monkeypatch.setattr(sys.modules["headprune.surgery.merges.outputs"], "RIDGES", (1e-6,))
    assert lost(4) > 1.8 * lost(64)  # fitted as closely as it goes


@pytest.mark.parametrize("name", MERGES)
@pytest.mark.parametrize("roles", ["qkvo", "k", "v", "x"])
def test_a_layer_of_zeros_merges_into_zeros(roles, name):
    h, groups = heads(per_kv=2), [(0, 1, 2), (3, 4, 5)]
    changes = {role: torch.zeros_like(getattr(h, role)) for role in roles if role != "x"}
    changes |= {f"{r}_bias": torch.zeros_like(getattr(h, f"{r}_bias")) for r in roles if r in "qkv"}
    h = replace(h, **changes)
    known = seen(h, 4)
    if roles == "x":
        nothing = torch.zeros_like(known.inputs["q"])
        scores = torch.zeros_like(known.queries), torch.zeros_like(known.keys)
        known = replace(
            known,
            inputs=dict.fromkeys(known.inputs, nothing),
            scored=lambda: scores,
            outputs=torch.zeros_like(known.outputs),
            read=lambda other: read_by(other, nothing),
        )
    context = MergeContext(activations=known)
    merged = MERGES[name](h, groups, context)
    for role in "qkvo":
        assert getattr(merged, role).isfinite().all()
        assert role not in roles or getattr(merged, role).abs().max() < 1e-12
    assert (lowrank_cost(h, context)((0, 1, 2)) < 1e-12) == (roles == "qkvo")


@pytest.mark.parametrize("where", ["inputs", "queries", "keys", "outputs"])
def test_calibration_that_is_not_finite_is_refused(where):
    h = heads()
    known = seen(h, 2)
    (known.inputs["q"] if where == "inputs" else getattr(known, where))[0, 0, 0] = torch.inf
    with pytest.raises(DataError, match="not finite"):
        MERGES["lowrank"](h, [tuple(range(6))], MergeContext(activations=known))


def test_similar_heads_find_each_other():
    pairs = [(0, 5), (1, 3), (2, 4)]
    h, context = alike(heads(), pairs), MergeContext(PAIRS["halves"])
    cost = lowrank_cost(h, context)
    assert sorted(similar(6, 3, cost)) == pairs
    assert sum(map(cost, pairs)) < 1e-9 < sum(map(cost, adjacent(6, 3)))  # type: ignore[arg-type]


def test_few_heads_are_partitioned_exactly_and_many_no_worse_than_neighbours():
    generator = torch.Generator().manual_seed(0)
    table = torch.rand(16, 16, generator=generator)

    def cost(group):
        return float(sum(table[a, b] for a, b in itertools.combinations(group, 2)))

    def by_force(left):
        if not left:
            return 0.0
        return min(
            cost((left[0], *rest)) + by_force(tuple(h for h in left[1:] if h not in rest))
            for rest in itertools.combinations(left[1:], 1)
        )

    assert sum(map(cost, similar(8, 4, cost))) == pytest.approx(by_force(tuple(range(8))))  # type: ignore[arg-type]
    assert partitions(16, 8) > EXACT
    found = similar(16, 8, cost)
    assert sorted(itertools.chain(*found)) == list(range(16))
    assert sum(map(cost, found)) < sum(map(cost, adjacent(16, 8)))  # type: ignore[arg-type]


def test_conjugate_gradients_solve_each_problem_on_its_own():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(3, 5, 5, generator=generator, dtype=torch.float64)
    matrix = root @ root.mT + torch.eye(5, dtype=torch.float64)
    matrix[1] *= 1e4  # of another size than its neighbours
    right = torch.randn(3, 5, 1, generator=generator, dtype=torch.float64)
    start = torch.zeros_like(right)
    got = conjugate_gradients(lambda x: matrix @ x, right, start, 5)
    torch.testing.assert_close(got, torch.linalg.solve(matrix, right))
    assert not torch.allclose(
        conjugate_gradients(lambda x: matrix @ x, right, start, 2), got, rtol=1e-3
    )


def test_lowrank_without_text_says_what_it_needs():
    with pytest.raises(PlanError, match="--calibrate"):
        MERGES["lowrank"](heads(), [(0, 1)], MergeContext())


def test_a_misspelt_merge_names_the_nearest():
    with pytest.raises(PlanError, match="'lowrank'"):
        MERGES["lowrnak"]
