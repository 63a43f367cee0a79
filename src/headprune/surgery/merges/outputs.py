"""W_O fitted to the original's outputs, after K and V have changed or heads are gone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from headprune.errors import DataError
from headprune.model.heads import HeadWeights
from headprune.surgery.merges.spec import MergeActivations
from headprune.tensors.least_squares import Moments, fit_held_out, held_out

RIDGES = (math.inf, 1e1, 3e0, 1e0, 3e-1, 1e-1, 3e-2, 1e-2, 1e-3)  # held-out sequences choose


@dataclass(frozen=True)
class OutputMoments:
    """Moments of the input of W_O, and of the outputs that it should give.

    Attributes:
        fitted: Of the sequences to fit on.
        judged: Of the sequences that choose the ridge.
    """

    fitted: Moments
    judged: Moments

    @classmethod
    def of(cls, inputs: Float[Tensor, "sequences length width"], outputs: Tensor) -> OutputMoments:
        """Sum over tokens; outputs have shape (sequences, length, out)."""
        held = held_out(len(inputs))
        parts = (
            Moments.of(inputs[part].flatten(0, 1), outputs[part].flatten(0, 1))
            for part in (~held, held)
        )
        return cls(*parts)

    @property
    def whole(self) -> Moments:
        """Moments of all sequences."""
        return self.fitted + self.judged


def with_fitted_outputs(
    heads: HeadWeights, moments: OutputMoments, kept: Sequence[int] | None = None
) -> tuple[HeadWeights, Float[Tensor, " out"]]:
    """Fit W_O to outputs, as near as held-out sequences allow.

    Args:
        heads: The weights.
        moments: Of the input of W_O.
        kept: Positions of the KV heads whose queries may write; None for all.

    Returns:
        The weights with another W_O, and the mean squared error left, per output.

    Raises:
        DataError: If the moments are not finite.
    """
    width = heads.o.shape[2]
    queries = range(len(heads.o)) if kept is None else heads.queries_of(kept)
    columns = [query * width + d for query in queries for d in range(width)]
    start = heads.o.transpose(0, 1).flatten(1)
    parts = moments.fitted.of_columns(columns), moments.judged.of_columns(columns)
    try:
        fit = fit_held_out(parts, start[:, columns].double(), RIDGES, heads.o_bias is not None)
    except ValueError:
        raise DataError(
            "The outputs of merged heads on the calibration text are not finite: the model's "
            "weights are too large. Choose another --merge."
        ) from None
    weight = torch.zeros_like(start)
    weight[:, columns] = fit.weight.to(start)
    by_head = weight.unflatten(1, (len(heads.o), width)).transpose(0, 1)
    bias = None if fit.shift is None else fit.shift.to(heads.o_bias)
    errors = fit.moments.errors(fit.weight) / max(fit.moments.tokens, 1)
    return replace(heads, o=by_head, o_bias=bias), errors


def output_errors(heads: HeadWeights, activations: MergeActivations) -> Float[Tensor, " out"]:
    """Return the mean squared difference to the original's outputs, per output."""
    outputs = activations.read(heads) @ heads.o.transpose(0, 1).flatten(1).T
    outputs = outputs if heads.o_bias is None else outputs + heads.o_bias
    return (outputs - activations.outputs).double().square().flatten(0, 1).mean(0)
