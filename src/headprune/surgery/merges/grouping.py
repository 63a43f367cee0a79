"""Groups of KV heads: neighbours, or the least lossy groups."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from headprune.model.heads import HeadWeights
from headprune.surgery.merges.spec import Groups, MergeContext
from headprune.tensors.lowrank import shared_key, shared_value

Cost = Callable[[tuple[int, ...]], float]
"""The cost of making some KV heads, as ascending positions, into one."""

EXACT = 20_000  # partitions that are all looked at; beyond, pairs of heads are swapped
_STARTS = 4


def adjacent(heads: int, groups: int) -> Groups:
    """Neighbours share, as in the grouped-query checkpoints of Ainslie et al. 2023."""
    size = heads // groups
    return [tuple(range(start, start + size)) for start in range(0, heads, size)]


def similar(heads: int, groups: int, cost: Cost) -> Groups:
    """The partition into equal groups with the least sum of costs.

    Exact as long as there are at most ``EXACT`` partitions; else the best that swapping two heads
    of different groups leads to, from several starts.
    """
    known = functools.cache(cost)
    size = heads // groups
    if partitions(heads, groups) <= EXACT:
        return min(_partitions(tuple(range(heads)), size), key=lambda p: sum(map(known, p)))
    starts = [adjacent(heads, groups)]
    starts += [[tuple(range(s, heads, groups)) for s in range(groups)]]  # every so-manyth head
    starts += [_nearest_first(heads, size, known)][: _STARTS - len(starts)]
    return min((_swapped(start, known) for start in starts), key=lambda p: sum(map(known, p)))


def partitions(heads: int, groups: int) -> int:
    """Number of ways to split heads into equal groups."""
    size = heads // groups
    same = math.factorial(size) ** groups * math.factorial(groups)
    return math.factorial(heads) // int(same)


def _partitions(heads: tuple[int, ...], size: int) -> Iterator[list[tuple[int, ...]]]:
    if not heads:
        yield []
        return
    for rest in itertools.combinations(heads[1:], size - 1):
        left = tuple(h for h in heads[1:] if h not in rest)
        for others in _partitions(left, size):
            yield [(heads[0], *rest), *others]


def _nearest_first(heads: int, size: int, cost: Cost) -> list[tuple[int, ...]]:
    """Grows each group by the head that costs it least."""
    left = list(range(heads))
    groups: list[tuple[int, ...]] = []
    while left:
        group: tuple[int, ...] = (left.pop(0),)
        while len(group) < size:
            group = min((tuple(sorted((*group, head))) for head in left), key=cost)
            left = [head for head in left if head not in group]
        groups.append(group)
    return groups


def _swapped(groups: Groups, cost: Cost) -> list[tuple[int, ...]]:
    current = [tuple(sorted(group)) for group in groups]
    improved = True
    while improved:
        improved = False
        for a, b in itertools.combinations(range(len(current)), 2):
            for x, y in itertools.product(current[a], current[b]):
                first = tuple(sorted((*(h for h in current[a] if h != x), y)))
                second = tuple(sorted((*(h for h in current[b] if h != y), x)))
                if cost(first) + cost(second) < cost(current[a]) + cost(current[b]) - 1e-12:
                    current[a], current[b], improved = first, second, True
                    break
    return current


def lowrank_cost(heads: HeadWeights, context: MergeContext) -> Cost:
    """Share of scores plus share of outputs that the best shared K and V of a group lose.

    In the metric of the activations; without any, as if inputs were white. Where a norm keeps
    queries from absorbing a map, only V counts.
    """
    known = context.activations
    moments = {r: None if known is None else known.second_moments[r] for r in ("q", "k", "v")}
    q, k, v = (heads.affine(role) for role in ("q", "k", "v"))
    query_moments = _sandwiched(q, moments["q"], q)
    key_moment = _sandwiched(k.flatten(0, 1), moments["k"], k.flatten(0, 1))
    value_moment = _sandwiched(v.flatten(0, 1), moments["v"], v.flatten(0, 1))

    def lost(group: tuple[int, ...]) -> tuple[float, float, float, float]:
        queries = heads.queries_of(group)
        owners = [group.index(heads.owners[query]) for query in queries]
        value = shared_value(heads.o[queries], owners, _block(value_moment, group, v.shape[1]))
        key = shared_key(
            query_moments[queries], owners, _block(key_moment, group, k.shape[1]), context.pairs
        )
        return key.lost, key.power, value.lost, value.power

    single = [lost((head,)) for head in range(len(k))]
    key_power = sum(s[1] for s in single) or 1.0  # a layer of zeros loses nothing
    value_power = sum(s[3] for s in single) or 1.0

    def cost(group: tuple[int, ...]) -> float:
        key_lost, _, value_lost, _ = lost(group)
        return value_lost / value_power + context.linear * key_lost / key_power

    return cost


def _sandwiched(left: Tensor, moment: Tensor | None, right: Tensor) -> Tensor:
    return left @ right.mT if moment is None else left @ moment @ right.mT


def _block(moment: Tensor, group: tuple[int, ...], width: int) -> Tensor:
    rows = torch.cat([torch.arange(head * width, (head + 1) * width) for head in group])
    return moment[rows][:, rows]
