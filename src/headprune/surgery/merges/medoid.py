"""The head of the group that is nearest to the others."""

from __future__ import annotations

import torch
from torch import Tensor

from headprune.surgery.merges.spec import MergeContext, each_group


def _medoid(k: Tensor, v: Tensor, context: MergeContext) -> tuple[Tensor, Tensor]:
    def distances(heads: Tensor) -> Tensor:
        rows = heads.flatten(1)
        return torch.cdist(rows, rows).square() / rows.square().sum().clamp(min=1e-30)

    head = int((distances(k) + distances(v)).sum(0).argmin())
    return k[head], v[head]


medoid = each_group(_medoid)
