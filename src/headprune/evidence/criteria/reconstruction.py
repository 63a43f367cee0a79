"""What the layer's output loses without a head once W_O is refitted to the others."""

from __future__ import annotations

import torch
from torch import Tensor

from headprune.evidence.criteria.spec import Criterion, UnitEvidence, Units, columns
from headprune.tensors.least_squares import removal_costs


def _score(evidence: UnitEvidence, units: Units) -> Tensor:
    assert evidence.gram is not None
    heads = evidence.output_weight
    weight = heads.transpose(0, 1).flatten(1).to(evidence.gram.device)
    blocks = [columns(unit, heads.shape[-1]) for unit in units]
    return torch.tensor(removal_costs(evidence.gram, weight, blocks), dtype=torch.float64)


reconstruction = Criterion(
    _score,
    source="least squares on W_O, one head after the other (tensors/least_squares.py)",
    sees="the other heads of its layer can say what it says",
    needs=frozenset({"gram"}),
    assumes_refit=True,
)
