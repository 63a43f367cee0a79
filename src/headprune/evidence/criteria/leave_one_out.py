"""Exact: how much the loss rises without a head. One pass over the data per head."""

from __future__ import annotations

from torch import Tensor

from headprune.evidence.criteria.spec import Criterion, UnitEvidence, Units


def _score(evidence: UnitEvidence, units: Units) -> Tensor:
    assert evidence.losses is not None
    return evidence.losses


leave_one_out = Criterion(
    _score,
    source="Michel et al. 2019, arXiv 1905.10650, section 3.2",
    sees="the loss is the same without it",
    needs=frozenset({"losses"}),
)
