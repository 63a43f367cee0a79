"""Voita et al. 2019: a head that looks at one token with most of its weight is confident."""

from __future__ import annotations

import torch
from torch import Tensor

from headprune.evidence.criteria.spec import Criterion, UnitEvidence, Units


def _score(evidence: UnitEvidence, units: Units) -> Tensor:
    assert evidence.attention is not None
    if not units:
        return evidence.attention[:0]
    return torch.stack([evidence.attention[list(unit)].mean() for unit in units])


confidence = Criterion(
    _score,
    source="Voita et al. 2019, arXiv 1905.09418, section 4: mean of the largest attention weight",
    sees="it spreads its attention evenly",
    needs=frozenset({"attention"}),
)
