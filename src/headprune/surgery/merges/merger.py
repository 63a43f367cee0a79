"""A merge and a grouping of KV heads."""

from __future__ import annotations

from dataclasses import dataclass

from headprune.config import ConvertConfig, Grouping
from headprune.model.heads import HeadWeights
from headprune.surgery.merges import MERGES, NEEDS_CALIBRATION, Groups, MergeContext
from headprune.surgery.merges.grouping import adjacent, lowrank_cost, similar


@dataclass(frozen=True)
class Merger:
    """Groups KV heads and merges them.

    Attributes:
        name: The merge.
        grouping: Which heads share.
    """

    name: str
    grouping: Grouping

    @classmethod
    def of(cls, config: ConvertConfig, calibrated: bool) -> Merger:
        """The one of a conversion, with or without text."""
        name = config.merge or ("lowrank" if calibrated else "mean")
        MERGES[name]  # refuses one that is not there
        return cls(name, config.grouping)

    @property
    def calibrates(self) -> bool:
        """True if it needs text."""
        return self.name in NEEDS_CALIBRATION

    def groups(self, heads: HeadWeights, setting: MergeContext, count: int) -> Groups:
        """Return ``count`` groups of heads that share."""
        if self.grouping is Grouping.ADJACENT or count in (1, len(heads.k)):
            return adjacent(len(heads.k), count)
        return similar(len(heads.k), count, lowrank_cost(heads, setting))

    def merged(self, heads: HeadWeights, setting: MergeContext, groups: Groups) -> HeadWeights:
        """The weights with the KV heads of every group made one."""
        if all(len(group) == 1 for group in groups):
            return heads
        return MERGES[self.name](heads, groups, setting)
