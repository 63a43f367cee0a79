"""The mean of the group's heads (Ainslie et al. 2023, arXiv 2305.13245, section 2.1)."""

from __future__ import annotations

from headprune.model.heads import HeadWeights
from headprune.surgery.merges.spec import Groups, MergeContext


def mean(heads: HeadWeights, groups: Groups, context: MergeContext) -> HeadWeights:
    """Average K and V, and leave Q and O as they are."""
    k, v = heads.affine("k").clone(), heads.affine("v").clone()
    for group in map(list, groups):
        k[group], v[group] = k[group].mean(0), v[group].mean(0)
    return heads.with_affine("k", k).with_affine("v", v)
