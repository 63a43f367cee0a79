"""Trained gates through the same door as the other criteria."""

from __future__ import annotations

from torch import Tensor

from headprune.evidence.criteria.spec import Criterion, UnitEvidence, Units


def _score(evidence: UnitEvidence, units: Units) -> Tensor:
    assert evidence.gates is not None
    return evidence.gates


gates = Criterion(
    _score,
    source="Voita et al. 2019, arXiv 1905.09418, eq. 6, trained by headprune train-gates",
    sees="training closed it",
    needs=frozenset({"gates"}),
)
