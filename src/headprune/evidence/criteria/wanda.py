"""Wanda over a head's block of W_O: weight times the norm of what it is multiplied with."""

from __future__ import annotations

from torch import Tensor

from headprune.evidence.criteria.spec import Criterion, UnitEvidence, Units, per_unit


def _score(evidence: UnitEvidence, units: Units) -> Tensor:
    assert evidence.activations is not None
    seen = evidence.activations
    norm = (seen.squares / max(seen.tokens, 1)).clamp(min=0).sqrt()
    weight = evidence.output_weight.double().abs().sum(1)
    return per_unit((weight * norm).sum(-1), units)


wanda = Criterion(
    _score,
    source="Sun et al. 2024, arXiv 2306.11695, eq. 1, summed over a head's block",
    sees="its output, or its block of W_O, is zero",
    needs=frozenset({"activations"}),
)
