"""How many directions a product of two matrices takes, by what it carries on data.

    Z = X A B^T Y^T     energy of direction i: the square of its i-th singular value

With A' = E[(x A)^T (x A)] and B' = E[(y B)^T (y B)], the second moments of both sides, these
squares are the eigenvalues of A' B', which is as wide as the head and not as X or Y.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def energies(
    first: Float[Tensor, "*heads width width"], second: Float[Tensor, "*heads width width"]
) -> Float[Tensor, "*heads width"]:
    """Energy by direction, largest first.

    Args:
        first: Second moment of one side; symmetric, without negative eigenvalues.
        second: Of the other.
    """
    values, vectors = torch.linalg.eigh(first.double())
    root = vectors * values.clamp(min=0).sqrt()[..., None, :]
    found: Tensor = torch.linalg.eigvalsh(root.mT @ second.double() @ root)
    return found.clamp(min=0).flip(-1)


def ranks(energies: Float[Tensor, "*heads width"], share: float) -> Int[Tensor, "*heads"]:
    """The fewest directions that hold a share of the energy; 0 where there is none."""
    held = energies.cumsum(-1)
    total = held[..., -1]
    return ((held < share * total[..., None]).sum(-1) + 1) * (total > 0)
