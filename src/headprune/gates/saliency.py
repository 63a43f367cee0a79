"""What closing a gate would cost the loss, to second order.

Optimal brain damage (LeCun, Denker and Solla 1990) on gates instead of weights: of a gate
that training has brought to its best value z nothing is left of the first order, and closing it
costs

    1/2 z^2 d2L/dz2,    with E[(dL/dz)^2] over sequences in place of d2L/dz2

which is what its Fisher information is (Kwon et al. 2022, arXiv 2204.09656, eq. 8). Costs are there
to be ranked, so that factors which all of them share are left out: the half, the tokens of a
sequence (about as many in all of them), and what an average over the first steps lacks.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headprune import processes


class ObdSaliency(nn.Module):
    """Squared gradients of all gates, averaged over the last steps.

    Args:
        units: How many gates there are.
        memory: Share of the average that stays at every step; 0.95 looks back some twenty.

    Attributes:
        squares: The running average, shape (units,).
    """

    squares: Float[Tensor, " units"]

    def __init__(self, units: int, memory: float = 0.95) -> None:
        super().__init__()
        self.memory = memory
        self.register_buffer("squares", torch.zeros(units))

    @torch.no_grad()
    def add(self, gradients: Float[Tensor, "batch units"]) -> None:
        """Takes in the gradients of a step, a row per sequence; averaged over processes."""
        new = processes.mean(gradients.float().square().mean(0).tolist())
        self.squares.lerp_(torch.tensor(new).to(self.squares), 1 - self.memory)

    def cost(self, values: Float[Tensor, " units"]) -> Float[Tensor, " units"]:
        """What closing each gate would cost, given what it is open by; up to a common factor."""
        return values.detach().square() * self.squares
