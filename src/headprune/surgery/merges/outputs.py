"""W_O after K and V have changed: fitted to the original's outputs, and judged by them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from headprune.errors import DataError
from headprune.model.heads import HeadWeights
from headprune.surgery.merges.spec import MergeActivations
from headprune.tensors.least_squares import Moments, fit_held_out, held_out

RIDGES = (math.inf, 1e1, 3e0, 1e0, 3e-1, 1e-1, 3e-2, 1e-2, 1e-3)  # held-out sequences choose


def with_fitted_outputs(
    heads: HeadWeights, read: Float[Tensor, "sequences length width"], wanted: Tensor
) -> HeadWeights:
    """W_O nearer to the wanted outputs, as near as sequences that are held out allow.

    Args:
        heads: Weights, of which W_O changes.
        read: What enters it.
        wanted: What it should give, shape (sequences, length, out).
    """
    weight, bias = _fitted(heads.o.transpose(0, 1).flatten(1), heads.o_bias, read, wanted)
    return replace(heads, o=_by_head(weight, heads), o_bias=bias)


def without(heads: HeadWeights, kept: Sequence[int], activations: MergeActivations) -> HeadWeights:
    """Weights in which only the queries of some KV heads write; with all of them, W_O refitted.

    Args:
        heads: The weights.
        kept: Positions of the KV heads that stay.
        activations: What calibration showed.
    """
    assert activations.read is not None
    width = heads.o.shape[2]
    left = [query * width + d for query in heads.queries_of(kept) for d in range(width)]
    weight = heads.o.transpose(0, 1).flatten(1)
    read = activations.read(heads)[..., left]
    fitted, bias = _fitted(weight[:, left], heads.o_bias, read, activations.outputs)
    weight = torch.zeros_like(weight)
    weight[:, left] = fitted
    return replace(heads, o=_by_head(weight, heads), o_bias=bias)


def _by_head(weight: Tensor, heads: HeadWeights) -> Tensor:
    by_head: Tensor = weight.unflatten(1, (len(heads.o), heads.o.shape[2])).transpose(0, 1)
    return by_head


def _fitted(
    weight: Float[Tensor, "out width"],
    bias: Tensor | None,
    read: Float[Tensor, "sequences length width"],
    wanted: Tensor,
) -> tuple[Float[Tensor, "out width"], Tensor | None]:
    """Weights and bias, as ``with_fitted_outputs`` fits them.

    Raises:
        DataError: If the statistics are not finite.
    """
    held = held_out(len(read))
    fitted, judged = (
        Moments.of(read[part].flatten(0, 1), wanted[part].flatten(0, 1)) for part in (~held, held)
    )
    try:
        fit = fit_held_out((fitted, judged), weight.double(), RIDGES, bias is not None)
    except ValueError:
        raise DataError(
            "What merged heads give on the calibration text is not finite: the model's weights are "
            "too large for it. Choose another --merge."
        ) from None
    return fit.weight.to(weight), None if fit.shift is None else fit.shift.to(bias)


def output_errors(heads: HeadWeights, activations: MergeActivations) -> Float[Tensor, " out"]:
    """Mean squared difference to the original's outputs, per coordinate, with other weights."""
    assert activations.read is not None
    read, wanted = activations.read(heads), activations.outputs
    made = read @ heads.o.transpose(0, 1).flatten(1).T.to(read)
    made = made if heads.o_bias is None else made + heads.o_bias.to(read)
    return (made - wanted).double().square().flatten(0, 1).mean(0)
