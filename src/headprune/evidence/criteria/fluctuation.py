"""FLAP's idea over heads: a head whose output hardly varies can be replaced by its mean."""

from __future__ import annotations

import torch
from torch import Tensor

from headprune.evidence.criteria.spec import Criterion, UnitEvidence, Units, per_unit


def _score(evidence: UnitEvidence, units: Units) -> Tensor:
    assert evidence.activations is not None
    seen, power = evidence.activations, evidence.output_weight.double().square().sum(1)
    mean = seen.sums / max(seen.tokens, 1)
    variance = (seen.squares / max(seen.tokens, 1) - mean.square()).clamp(min=0)
    scores = per_unit((variance * power).sum(-1), units)
    if len(scores) < 2:
        return torch.zeros_like(scores)
    # FLAP's own standardisation, without which the layer with the largest outputs keeps them all
    return (scores - scores.mean()) / scores.std().clamp(min=1e-30)


fluctuation = Criterion(
    _score,
    source="An et al. 2024 (FLAP), arXiv 2312.11983, eq. 5, standardised per layer",
    sees="its output is constant",
    needs=frozenset({"activations"}),
)
