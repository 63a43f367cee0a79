"""What the loss loses without a head once W_O is refitted to the others.

``reconstruction`` says what the layer's output loses; here every coordinate of the output counts as
much as the loss feels it. A small change r of the outputs changes the loss by r^T F r / 2, F being
the Fisher information of the outputs, of which the diagonal is taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headprune.evidence.criteria.spec import Criterion, UnitEvidence, Units, columns
from headprune.tensors.least_squares import removal_costs


def _score(evidence: UnitEvidence, units: Units) -> Tensor:
    assert evidence.gram is not None
    assert evidence.curvature is not None
    heads = evidence.output_weight
    weight = heads.transpose(0, 1).flatten(1).double() * evidence.curvature.sqrt()[:, None]
    blocks = [columns(unit, heads.shape[-1]) for unit in units]
    costs = removal_costs(evidence.gram, weight.to(evidence.gram.device), blocks)
    return torch.tensor(costs, dtype=torch.float64)


compensated = Criterion(
    _score,
    source="least squares on W_O, weighted with the loss' Fisher information (this project)",
    sees="the other heads of its layer can say what it says, or the loss does not feel it",
    needs=frozenset({"gram", "curvature"}),
    assumes_refit=True,
)
