"""New random K and V of the group's spread (Ainslie et al. 2023, arXiv 2305.13245, section 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from headprune.surgery.merges.spec import MergeContext, each_group


def _random(k: Tensor, v: Tensor, context: MergeContext) -> tuple[Tensor, Tensor]:
    if _all_equal(k) and _all_equal(v):
        return k[0], v[0]  # nothing to merge
    generator = torch.Generator().manual_seed(context.seed)
    return _drawn(k, generator), _drawn(v, generator)


def _drawn(heads: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(heads.shape[1:], generator=generator)
    return noise.to(heads) * heads.std(correction=0)


def _all_equal(heads: Tensor) -> bool:
    return bool((heads == heads[:1]).all())


random = each_group(_random)
