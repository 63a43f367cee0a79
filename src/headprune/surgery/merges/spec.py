"""Input and output of a merge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Float
from torch import Tensor

from headprune.model.heads import HeadWeights
from headprune.tensors.rotary import RotaryPairs, Rotation

Groups = Sequence[Sequence[int]]
"""Positions of the KV heads that become one, for every KV head of the result."""


@dataclass(frozen=True)
class MergeActivations:
    """Inputs and wanted outputs of one attention module, on calibration text.

    Attributes:
        inputs: Inputs of the projection of a role ("q", "k", "v") in the converted model, shape
            (sequences, length, hidden); with a 1 at the end where it has a bias.
        scored: Computes ``queries`` and ``keys``.
        rotation: The rotary embedding; None without one.
        scaling: Factor of the scores.
        attention: The model's own attention, for one sequence at a time: of the queries at some
            rows, all keys, a slice of one sequence and these rows, the probabilities, shape
            (1, query heads, rows, length).
        outputs: Outputs of the original model's W_O, shape (sequences, length,
            hidden).
        read: From other weights of this module to what then enters its output projection in the
            converted model, shape (sequences, length, query heads x head_dim).
        shifts_count: Whether adding a number to all scores of a query changes its attention.
    """

    inputs: dict[str, Float[Tensor, "sequences _ _"]]
    scored: Callable[[], tuple[Tensor, Tensor]]
    rotation: Rotation | None
    scaling: float
    attention: Callable[[Tensor, Tensor, slice, Tensor], Tensor]
    outputs: Float[Tensor, "sequences length out"]
    read: Callable[[HeadWeights], Tensor]
    shifts_count: bool = False

    @cached_property
    def _scored(self) -> tuple[Tensor, Tensor]:
        return self.scored()

    @property
    def queries(self) -> Float[Tensor, "sequences query_heads length head_dim"]:
        """The queries of this module, with its weights as they were, as they enter the scores."""
        return self._scored[0]

    @property
    def keys(self) -> Float[Tensor, "sequences kv_heads source head_dim"]:
        """The same for its keys, one per KV head."""
        return self._scored[1]

    @cached_property
    def second_moments(self) -> dict[str, Float[Tensor, "hidden hidden"]]:
        """E[x x^T] of the inputs of every role; roles that share their input share the work."""
        found: dict[str, Tensor] = {}
        for role, inputs in self.inputs.items():
            same = next((r for r in found if self.inputs[r] is inputs), None)
            rows = inputs.flatten(0, 1)
            found[role] = rows.T @ rows / len(rows) if same is None else found[same]
        return found


def project(
    inputs: Float[Tensor, "sequences length hidden"],
    weight: Float[Tensor, "heads head_dim hidden"],
) -> Float[Tensor, "sequences heads length head_dim"]:
    """Return the outputs of the heads of a projection."""
    flat: Tensor = (inputs @ weight.flatten(0, 1).T).unflatten(-1, weight.shape[:2])
    return flat.transpose(1, 2)


@dataclass(frozen=True)
class MergeContext:
    """Facts for a merge beside the weights.

    Attributes:
        pairs: Rotated pairs of coordinates; None without a rotary embedding.
        linear: Whether queries and keys enter the scores as their projections give them, rotated
            at most; otherwise a norm stands between.
        activations: What calibration showed; None without calibration.
    """

    pairs: RotaryPairs | None = None
    linear: bool = True
    activations: MergeActivations | None = None


Merge = Callable[[HeadWeights, Groups, MergeContext], HeadWeights]
"""Returns weights of the same shapes, whose K and V are equal within each group."""
