"""The mean of the group's heads after rotating each to fit the others (arXiv 2412.20677).

Heads compute in bases of their own, and a rotation of K can be undone by the queries, one of V by
W_O. So each head is rotated, by the orthogonal Procrustes solution, towards the mean of the group,
and the mean is taken again, a few times. Where K is rotary, only rotations within its pairs commute
with the embedding; where a norm follows, none can be undone, and K is averaged as it is.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headprune.model.heads import HeadWeights
from headprune.surgery.merges.spec import Groups, MergeContext
from headprune.tensors.rotary import RotaryPairs

_ROUNDS = 5


def procrustes(heads: HeadWeights, groups: Groups, context: MergeContext) -> HeadWeights:
    """Rotates, averages, and hands the rotations to W_Q and W_O."""
    q, k = heads.affine("q").clone(), heads.affine("k").clone()
    v, o = heads.affine("v").clone(), heads.o.clone()
    owners = heads.owners
    for group in map(list, groups):
        if context.linear:
            rotations = _rotations(k[group], context.pairs)
            k[group] = (rotations @ k[group]).mean(0)
            for query in heads.queries_of(group):
                q[query] = rotations[group.index(owners[query])] @ q[query]
        else:
            k[group] = k[group].mean(0)
        rotations = _rotations(v[group], None)
        v[group] = (rotations @ v[group]).mean(0)
        for query in heads.queries_of(group):
            o[query] = o[query] @ rotations[group.index(owners[query])].T
    merged = heads.with_affine("q", q).with_affine("k", k).with_affine("v", v)
    return replace(merged, o=o)


def _rotations(heads: Tensor, pairs: RotaryPairs | None) -> Tensor:
    """Orthogonal maps, shape (heads, head_dim, head_dim), that bring the heads together."""
    width = heads.shape[1]
    rotations = torch.eye(width, dtype=heads.dtype, device=heads.device).repeat(len(heads), 1, 1)
    for _ in range(_ROUNDS):
        target = (rotations @ heads).mean(0)
        for position, head in enumerate(heads):
            rotations[position] = _rotation(head @ target.T, pairs)
    return rotations


def _rotation(cross: Tensor, pairs: RotaryPairs | None) -> Tensor:
    """The orthogonal T with the largest trace(T cross) that commutes with the rotation."""
    if pairs is None:
        return _polar(cross)
    rotation = torch.zeros_like(cross)
    unpaired = pairs.unpaired
    if len(unpaired):
        rotation[unpaired[:, None], unpaired] = _polar(cross[unpaired][:, unpaired])
    a, b = pairs.first, pairs.second
    cosine, sine = cross[a, a] + cross[b, b], cross[a, b] - cross[b, a]
    size = torch.hypot(cosine, sine).clamp(min=1e-30)
    rotation[a, a] = rotation[b, b] = cosine / size
    rotation[b, a], rotation[a, b] = sine / size, -sine / size
    return rotation


def _polar(cross: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(cross)
    rotation: Tensor = right.mT @ left.mT
    return rotation
