"""What a criterion is given, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Need = Literal["gradients", "activations", "gram", "curvature", "attention", "losses", "gates"]
"""What has to be measured: see the attribute of ``UnitEvidence`` of the same name."""

Units = Sequence[Sequence[int]]
"""Positions of the query heads of every unit of one attention module."""


@dataclass(frozen=True)
class Activations:
    """Sums over real tokens of what enters the output projection, per coordinate of every head.

    Attributes:
        sums: Sum of x, shape (query heads, head_dim).
        squares: Sum of x^2, shape (query heads, head_dim).
        tokens: Tokens summed; padding does not count.
    """

    sums: Float[Tensor, "heads head_dim"]
    squares: Float[Tensor, "heads head_dim"]
    tokens: int

    def __add__(self, other: Activations) -> Activations:
        return Activations(
            self.sums + other.sums, self.squares + other.squares, self.tokens + other.tokens
        )


@dataclass(frozen=True)
class UnitEvidence:
    """What is known of one attention module; None for what no criterion asked for.

    Attributes:
        path: The module's path.
        read_output: Reads W_O, which lies in the model: ``output_weight``.
        gradients: Per example, d loss / d gate of every query head, shape (examples, query heads);
            the loss of an example is the mean over its scored tokens.
        activations: What enters W_O.
        gram: Sum over tokens of x x^T of what enters W_O, shape (heads x head_dim, the same).
        curvature: Mean over tokens of (d loss / d output)^2, the loss of an example being a mean
            itself, per coordinate of what W_O gives, shape (hidden,).
        attention: Per query head, the mean over tokens of its largest attention weight, special
            tokens not counted, shape (query heads,).
        losses: Per unit, the mean loss per example without it, less that of the whole model.
        gates: Per unit, what trained gates say: log_alpha, above all others where it stayed open.
        scored: Scores by criterion, of those whose evidence is dropped once it has been used.
        seed: Seed of what is random.
    """

    path: str
    read_output: Callable[[], Tensor]
    gradients: Float[Tensor, "examples heads"] | None = None
    activations: Activations | None = None
    gram: Float[Tensor, "width width"] | None = None
    curvature: Float[Tensor, " hidden"] | None = None
    attention: Float[Tensor, " heads"] | None = None
    losses: Float[Tensor, " units"] | None = None
    gates: Float[Tensor, " units"] | None = None
    scored: Mapping[str, Tensor] = field(default_factory=dict)
    seed: int = 0

    @property
    def output_weight(self) -> Float[Tensor, "heads hidden head_dim"]:
        """W_O; a copy in float32, for as long as it is used."""
        return self.read_output()


@dataclass(frozen=True)
class Criterion:
    """A way to score heads.

    Attributes:
        score: From the evidence of one module and its units to a score per unit; higher is kept
            first, and scores of different modules compare.
        needs: What has to be measured for it.
        assumes_refit: Whether a score is what is lost once W_O is refitted, and not before.
        source: Where it comes from.
        sees: What a head must be for this criterion to score it lowest.
    """

    score: Callable[[UnitEvidence, Units], Tensor]
    source: str
    sees: str
    needs: frozenset[Need] = frozenset()
    assumes_refit: bool = False


def per_unit(
    per_head: Float[Tensor, "*batch heads"], units: Units
) -> Float[Tensor, "*batch units"]:
    """Sums of what the query heads of every unit have."""
    if not units:
        return per_head[..., :0]
    return torch.stack([per_head[..., list(unit)].sum(-1) for unit in units], dim=-1)


def columns(unit: Sequence[int], head_dim: int) -> list[int]:
    """The columns of W_O that belong to the heads of a unit."""
    return [head * head_dim + at for head in unit for at in range(head_dim)]


def first_not_finite(values: Tensor) -> tuple[int, ...] | None:
    """Where the first NaN or infinity stands."""
    wrong: Bool[Tensor, ...] = ~torch.isfinite(values)
    return tuple(wrong.nonzero()[0].tolist()) if bool(wrong.any()) else None
