"""Kwon et al. 2022: the diagonal of the empirical Fisher information of the gates."""

from __future__ import annotations

from torch import Tensor

from headprune.evidence.criteria.spec import Criterion, UnitEvidence, Units, per_unit


def _score(evidence: UnitEvidence, units: Units) -> Tensor:
    assert evidence.gradients is not None
    return per_unit(evidence.gradients, units).square().mean(0)


fisher = Criterion(
    _score,
    source="Kwon et al. 2022, arXiv 2204.09656, eq. 8, averaged over examples",
    sees="its gate does not move the loss",
    needs=frozenset({"gradients"}),
)
