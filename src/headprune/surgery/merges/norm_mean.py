"""The mean of the group's heads, as large as they were: averaging unlike heads shrinks them."""

from __future__ import annotations

from torch import Tensor

from headprune.surgery.merges.spec import MergeContext, each_group


def _norm_mean(k: Tensor, v: Tensor, context: MergeContext) -> tuple[Tensor, Tensor]:
    return _restored(k), _restored(v)


def _restored(heads: Tensor) -> Tensor:
    pooled = heads.mean(0)
    size = heads.flatten(1).norm(dim=1).mean() / pooled.norm().clamp(min=1e-12)
    restored: Tensor = pooled * size
    return restored


norm_mean = each_group(_norm_mean)
