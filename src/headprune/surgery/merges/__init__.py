"""Merges: how the KV heads of a group become one. One file each; a new one is a row here."""

from headprune.errors import PlanError
from headprune.merging.first import first
from headprune.merging.lowrank import lowrank
from headprune.merging.mean import mean
from headprune.merging.medoid import medoid
from headprune.merging.norm_mean import norm_mean
from headprune.merging.procrustes import procrustes
from headprune.merging.random import random
from headprune.merging.spec import Groups, HeadWeights, Merge, MergeActivations, MergeContext
from headprune.registry import Registry

__all__ = [
    "MERGES",
    "NEEDS_CALIBRATION",
    "Groups",
    "HeadWeights",
    "Merge",
    "MergeActivations",
    "MergeContext",
]

MERGES: Registry[Merge] = Registry("merge", PlanError)
MERGES.add("mean", mean)
MERGES.add("first", first)
MERGES.add("random", random)
MERGES.add("medoid", medoid)
MERGES.add("norm-mean", norm_mean)
MERGES.add("procrustes", procrustes)
MERGES.add("lowrank", lowrank)
MERGES.freeze()

NEEDS_CALIBRATION = frozenset({"lowrank"})
