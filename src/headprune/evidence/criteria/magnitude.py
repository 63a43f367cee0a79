"""A control: the Frobenius norm of a head's block of W_O."""

from __future__ import annotations

from torch import Tensor

from headprune.evidence.criteria.spec import Criterion, UnitEvidence, Units, per_unit


def _score(evidence: UnitEvidence, units: Units) -> Tensor:
    return per_unit(evidence.output_weight.double().square().sum((1, 2)), units).sqrt()


magnitude = Criterion(
    _score,
    source="a control: |W_O| of the head's block",
    sees="its block of W_O is zero",
)
