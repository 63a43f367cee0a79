"""Merges: how the KV heads of a group become one. One file each; a new one is a row here."""

from headprune.errors import PlanError
from headprune.model.heads import HeadWeights
from headprune.registry import Registry
from headprune.surgery.merges.lowrank import lowrank
from headprune.surgery.merges.mean import mean
from headprune.surgery.merges.procrustes import procrustes
from headprune.surgery.merges.spec import Groups, Merge, MergeActivations, MergeContext

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
MERGES.add("procrustes", procrustes)
MERGES.add("lowrank", lowrank)
MERGES.freeze()

NEEDS_CALIBRATION = frozenset({"lowrank"})
