"""Michel et al. 2019: how steeply the loss depends on a head's gate."""

from __future__ import annotations

from torch import Tensor

from headprune.evidence.criteria.spec import Criterion, UnitEvidence, Units, per_unit


def _score(evidence: UnitEvidence, units: Units) -> Tensor:
    assert evidence.gradients is not None
    return per_unit(evidence.gradients, units).abs().mean(0)


gradient = Criterion(
    _score,
    source="Michel et al. 2019, arXiv 1905.10650, eq. 3, averaged over examples",
    sees="its gate does not move the loss",
    needs=frozenset({"gradients"}),
)
