"""A control: no information at all."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from headprune.evidence.criteria.spec import Criterion, UnitEvidence, Units


def _score(evidence: UnitEvidence, units: Units) -> Tensor:
    # by path, so that a module's scores do not depend on which others are scored
    digest = hashlib.sha256(f"{evidence.seed} {evidence.path}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.rand(len(units), generator=generator, dtype=torch.float64)


random = Criterion(_score, source="a control: a draw with seed", sees="nothing")
