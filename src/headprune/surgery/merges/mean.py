"""The mean of the group's heads (Ainslie et al. 2023, arXiv 2305.13245, section 2.1)."""

from __future__ import annotations

from torch import Tensor

from headprune.surgery.merges.spec import MergeContext, each_group


def _mean(k: Tensor, v: Tensor, context: MergeContext) -> tuple[Tensor, Tensor]:
    return k.mean(0), v.mean(0)


mean = each_group(_mean)
