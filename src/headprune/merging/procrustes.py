"""The mean of the group's heads after turning each to fit the others (arXiv 2412.20677).

Heads compute in bases of their own, and a rotation of K can be undone by the queries, one of V by
W_O. So each head is turned, by the orthogonal Procrustes solution, towards the mean of the group,
and the mean is taken again, a few times. Where K is rotary, only turns within its planes commute
with the embedding; where a norm follows, none can be undone, and K is averaged as it is.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headprune.merging.spec import Groups, Heads, Setting
from headprune.tensors.rotary import Planes

_ROUNDS = 5


def procrustes(heads: Heads, groups: Groups, setting: Setting) -> Heads:
    """Turns, averages, and hands the turns to W_Q and W_O."""
    q, k = heads.affine("q").clone(), heads.affine("k").clone()
    v, o = heads.affine("v").clone(), heads.o.clone()
    owners = heads.owners
    for group in map(list, groups):
        if setting.linear:
            turns = _turns(k[group], setting.planes)
            k[group] = (turns @ k[group]).mean(0)
            for query in heads.queries_of(group):
                q[query] = turns[group.index(owners[query])] @ q[query]
        else:
            k[group] = k[group].mean(0)
        turns = _turns(v[group], None)
        v[group] = (turns @ v[group]).mean(0)
        for query in heads.queries_of(group):
            o[query] = o[query] @ turns[group.index(owners[query])].T
    merged = heads.with_affine("q", q).with_affine("k", k).with_affine("v", v)
    return replace(merged, o=o)


def _turns(heads: Tensor, planes: Planes | None) -> Tensor:
    """Orthogonal maps, shape (heads, head_dim, head_dim), that bring the heads together."""
    width = heads.shape[1]
    turns = torch.eye(width, dtype=heads.dtype).repeat(len(heads), 1, 1)
    for _ in range(_ROUNDS):
        target = (turns @ heads).mean(0)
        for position, head in enumerate(heads):
            turns[position] = _turn(head @ target.T, planes)
    return turns


def _turn(cross: Tensor, planes: Planes | None) -> Tensor:
    """The orthogonal T with the largest trace(T cross) that commutes with the rotation."""
    if planes is None:
        return _polar(cross)
    turn = torch.zeros_like(cross)
    still = planes.still
    if len(still):
        turn[still[:, None], still] = _polar(cross[still][:, still])
    a, b = planes.first, planes.second
    cosine, sine = cross[a, a] + cross[b, b], cross[a, b] - cross[b, a]
    size = torch.hypot(cosine, sine).clamp(min=1e-30)
    turn[a, a] = turn[b, b] = cosine / size
    turn[b, a], turn[a, b] = sine / size, -sine / size
    return turn


def _polar(cross: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(cross)
    turn: Tensor = right.mT @ left.mT
    return turn
