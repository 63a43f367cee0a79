"""Criteria: the importance of a head. One decorated function each.

A function takes the statistics of one attention module and its units, and returns a score per
unit: the highest are kept first, and scores of different modules compare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from headprune.errors import PlanError
from headprune.evidence.statistics import Need, Statistics, Units
from headprune.registry import Registry
from headprune.tensors.draws import generator_for
from headprune.tensors.least_squares import removal_costs

Score = Callable[[Statistics, Units], Tensor]


@dataclass(frozen=True)
class Criterion:
    """A way to score heads.

    Attributes:
        score: From the statistics of a module and its units to a score per unit.
        source: Paper and equation.
        sees: Property of a head that gives it the lowest score.
        needs: Statistics that it takes.
        assumes_refit: Whether scores hold for a cut with refitted W_O.
    """

    score: Score
    source: str
    sees: str
    needs: frozenset[Need] = frozenset()
    assumes_refit: bool = False


CRITERIA: Registry[Criterion] = Registry("criterion", PlanError)


def criterion(
    name: str, source: str, sees: str, needs: Sequence[Need] = (), assumes_refit: bool = False
) -> Callable[[Score], Score]:
    """Register a criterion; see ``Criterion``."""

    def register(score: Score) -> Score:
        CRITERIA.add(name, Criterion(score, source, sees, frozenset(needs), assumes_refit))
        return score

    return register


def per_unit(
    per_head: Float[Tensor, "*batch heads"], units: Units
) -> Float[Tensor, "*batch units"]:
    """Sum over the query heads of every unit."""
    if not units:
        return per_head[..., :0]
    return torch.stack([per_head[..., list(unit)].sum(-1) for unit in units], dim=-1)


def columns(unit: Sequence[int], head_dim: int) -> list[int]:
    """Return the columns of W_O that belong to the heads of a unit."""
    return [head * head_dim + at for head in unit for at in range(head_dim)]


@criterion(
    "gradient",
    source="Michel et al. 2019, arXiv 1905.10650, eq. 3, averaged over examples",
    sees="its gate does not move the loss",
    needs=["gradients"],
)
def gradient(statistics: Statistics, units: Units) -> Tensor:
    """Michel et al. 2019: how steeply the loss depends on a head's gate."""
    return per_unit(statistics.gradients, units).abs().mean(0)


@criterion(
    "fisher",
    source="Kwon et al. 2022, arXiv 2204.09656, eq. 8, averaged over examples",
    sees="its gate does not move the loss",
    needs=["gradients"],
)
def fisher(statistics: Statistics, units: Units) -> Tensor:
    """Kwon et al. 2022: the diagonal of the empirical Fisher information of the gates."""
    return per_unit(statistics.gradients, units).square().mean(0)


@criterion(
    "fluctuation",
    source="An et al. 2024 (FLAP), arXiv 2312.11983, eq. 5, standardised per layer",
    sees="its output is constant",
    needs=["activations"],
)
def fluctuation(statistics: Statistics, units: Units) -> Tensor:
    """FLAP over heads: a head whose output hardly varies can be replaced by its mean."""
    inputs, power = statistics.activations, statistics.output_weight.double().square().sum(1)
    mean = inputs.sums / max(inputs.tokens, 1)
    variance = (inputs.squares / max(inputs.tokens, 1) - mean.square()).clamp(min=0)
    scores = per_unit((variance * power).sum(-1), units)
    if len(scores) < 2:
        return torch.zeros_like(scores)
    # FLAP's standardisation, without which the layer with the largest outputs keeps all its heads
    return (scores - scores.mean()) / scores.std().clamp(min=1e-30)


@criterion(
    "wanda",
    source="Sun et al. 2024, arXiv 2306.11695, eq. 1, summed over a head's block",
    sees="its output, or its block of W_O, is zero",
    needs=["activations"],
)
def wanda(statistics: Statistics, units: Units) -> Tensor:
    """Wanda over a head's block of W_O: weight times the norm of its input."""
    inputs = statistics.activations
    norm = (inputs.squares / max(inputs.tokens, 1)).clamp(min=0).sqrt()
    weight = statistics.output_weight.double().abs().sum(1)
    return per_unit((weight * norm).sum(-1), units)


@criterion(
    "reconstruction",
    source="least squares on W_O, one head after the other (tensors/least_squares.py)",
    sees="the other heads of its layer can replace it",
    needs=["gram"],
    assumes_refit=True,
)
def reconstruction(statistics: Statistics, units: Units) -> Tensor:
    """The error of the layer's output without a head, once W_O is refitted to the others."""
    return _removal_costs(statistics, units, statistics.output_weight)


@criterion(
    "compensated",
    source="least squares on W_O, weighted with the loss' Fisher information (this project)",
    sees="the other heads of its layer can replace it, or the loss does not feel it",
    needs=["gram", "curvature", "recall"],
    assumes_refit=True,
)
def compensated(statistics: Statistics, units: Units) -> Tensor:
    """The loss without a head, once W_O is refitted to the others.

    As ``reconstruction``, with every coordinate of the output weighted by the loss. A small change
    r of the outputs changes the loss by r^T F r / 2. F is the Fisher information of the outputs, of
    which the diagonal is taken. In language models, units that carry words that only their passage
    tells are raised (``recall.raised``).
    """
    root = statistics.curvature.sqrt()[None, :, None]
    return _removal_costs(statistics, units, statistics.output_weight.double() * root)


def _removal_costs(
    statistics: Statistics, units: Units, heads: Float[Tensor, "heads hidden head_dim"]
) -> Tensor:
    weight = heads.transpose(0, 1).flatten(1).to(statistics.gram.device)
    blocks = [columns(unit, heads.shape[-1]) for unit in units]
    return torch.tensor(removal_costs(statistics.gram, weight, blocks), dtype=torch.float64)


@criterion(
    "magnitude",
    source="a control: |W_O| of the head's block",
    sees="its block of W_O is zero",
)
def magnitude(statistics: Statistics, units: Units) -> Tensor:
    """A control: the Frobenius norm of a head's block of W_O."""
    return per_unit(statistics.output_weight.double().square().sum((1, 2)), units).sqrt()


@criterion("random", source="a control: a draw with the seed", sees="nothing")
def random(statistics: Statistics, units: Units) -> Tensor:
    """A control: no information at all."""
    # by path, so that a module's scores do not depend on which others are scored
    generator = generator_for(f"{statistics.seed} {statistics.path}".encode())
    return torch.rand(len(units), generator=generator, dtype=torch.float64)


CRITERIA.freeze()
