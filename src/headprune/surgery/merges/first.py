"""The first head of the group (Ainslie et al. 2023, arXiv 2305.13245, section 3.3)."""

from __future__ import annotations

from torch import Tensor

from headprune.surgery.merges.spec import MergeContext, each_group


def _first(k: Tensor, v: Tensor, context: MergeContext) -> tuple[Tensor, Tensor]:
    return k[0], v[0]


first = each_group(_first)
