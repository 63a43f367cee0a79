"""The hard-concrete distribution (Louizos et al. 2018, arXiv 1712.01312, eqs. 10-12).

    u ~ U(0, 1)
    s = sigmoid((log u - log(1 - u) + log_alpha) / beta)
    z = clip(s (zeta - gamma) + gamma, 0, 1)

A gate ``z`` lies in [0, 1] and is exactly 0, and exactly 1, with positive probability, so a head
can be switched off by gradient descent. ``gamma = -0.1`` and ``zeta = 1.1`` as in the paper.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

GAMMA = -0.1
ZETA = 1.1
BOUND = math.log(1e2)
"""``log_alpha`` is held within +-BOUND, as in the code of Louizos et al. (``constrain_parameters``
in AMLab-Amsterdam/L0_regularization): beyond it next to no draw has a gradient."""
_EPS = 1e-6


def sample(
    log_alpha: Float[Tensor, " gates"], temperature: float, draws: int
) -> Float[Tensor, "draws gates"]:
    """Draw gates; the gradient reaches ``log_alpha`` through the draw (reparametrised).

    The draws of a gate are spread evenly (Latin hypercube; McKay, Beckman and Conover 1979): one u
    in each of ``draws`` equal parts of (0, 1), in an order of chance. Each is uniform, and gates
    are independent. A gate open with probability 3/4 is open in three of four draws, not in none
    to four: less noise in the gradient of their mean.

    Args:
        log_alpha: Location of every gate; large means open.
        temperature: beta of the paper, > 0.
        draws: Number of draws, for instance one per sequence of the batch.
    """
    rows = log_alpha.detach().expand(draws, *log_alpha.shape)
    part = torch.rand_like(rows).argsort(0)
    u = (part + torch.rand_like(rows)) / draws
    u = u.clamp(_EPS, 1 - _EPS)
    s = torch.sigmoid((u.log() - torch.log1p(-u) + log_alpha) / temperature)
    return (s * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


def open_probability(
    log_alpha: Float[Tensor, "*some gates"], temperature: float
) -> Float[Tensor, "*some gates"]:
    """P(z != 0) = sigmoid(log_alpha - beta log(-gamma / zeta)); its sum is the expected L0 norm."""
    return torch.sigmoid(log_alpha - temperature * math.log(-GAMMA / ZETA))


def open_share(
    log_alpha: Float[Tensor, "*some gates"], temperature: float
) -> Float[Tensor, "*some gates"]:
    """``open_probability`` on a scale from 0 at the lower bound to 1 at the upper bound.

    An exact count of heads is then met by gates at their bounds.
    """
    zero = temperature * math.log(-GAMMA / ZETA)
    low, high = (1 / (1 + math.exp(zero - bound)) for bound in (-BOUND, BOUND))
    share: Tensor = (open_probability(log_alpha, temperature) - low) / (high - low)
    return share


def value(log_alpha: Float[Tensor, " gates"]) -> Float[Tensor, " gates"]:
    """The gate at test time: z = clip(sigmoid(log_alpha)(zeta - gamma) + gamma, 0, 1)."""
    return (torch.sigmoid(log_alpha) * (ZETA - GAMMA) + GAMMA).clamp(0, 1)
