"""Least squares on an output projection, from second moments of what enters it.

With x the inputs of W_O (one column block per head) and y the outputs it should give,

    W' = W + argmin_D  E|y - (W + D) x|^2 + ridge |D|^2

so that a ridge pulls towards the weights that are there, and never raises the error. Nothing but
E[x x^T] and E[y x^T] is needed (for single weights: Frantar and Alistarh 2023, arXiv 2301.00774,
eq. 3; here for whole blocks of columns, and with a bias where there is one).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

HELD_OUT = 8
REMOVAL_RIDGE = 1e-2  # share of the mean diagonal; about what held-out tokens choose in a refit
_FLOOR = 1e-9  # of the mean diagonal: what keeps a singular moment solvable
_ROWS = 4096  # tokens at once in products: this bounds the copies in another dtype


def product_dtype(device: torch.device) -> torch.dtype:
    """Return the type of products of tokens: float64 on the CPU, float32 on a GPU.

    Most GPUs take float64 at a 32nd or a 64th of the speed of float32.
    """
    return torch.float64 if device.type == "cpu" else torch.float32


def outer_sum(a: Float[Tensor, "tokens m"], b: Float[Tensor, "tokens n"]) -> Float[Tensor, "m n"]:
    """Sum over tokens of a b^T: products in ``product_dtype``, their sums in float64.

    Means are taken off before the products and added again as sums, or a large mean would leave
    float32 no digits for what varies.
    """
    dtype = product_dtype(a.device)
    total = torch.zeros(a.shape[1], b.shape[1], dtype=torch.float64, device=a.device)
    for some, others in zip(a.split(_ROWS), b.split(_ROWS), strict=True):
        if not len(some):
            continue
        means = some.mean(0, dtype=torch.float64), others.mean(0, dtype=torch.float64)
        total += ((some - means[0]).to(dtype).T @ (others - means[1]).to(dtype)).double()
        total += len(some) * torch.outer(*means)
    return total


@dataclass(frozen=True)
class Moments:
    """Sums over tokens, in float64; those of shards of the data add up.

    Attributes:
        inputs: Sum of x x^T, shape (width, width).
        cross: Sum of y x^T, shape (out, width).
        input_sum: Sum of x, shape (width,).
        output_sum: Sum of y, shape (out,).
        output_power: Sum of y^2, shape (out,).
        tokens: Number of tokens.
    """

    inputs: Float[Tensor, "width width"]
    cross: Float[Tensor, "out width"]
    input_sum: Float[Tensor, " width"]
    output_sum: Float[Tensor, " out"]
    output_power: Float[Tensor, " out"]
    tokens: int

    @classmethod
    def of(cls, x: Float[Tensor, "tokens width"], y: Float[Tensor, "tokens out"]) -> Moments:
        """Moments of some tokens."""
        sums = x.sum(0, dtype=torch.float64), y.sum(0, dtype=torch.float64)
        power = torch.stack([some.double().square().sum(0) for some in y.split(_ROWS)]).sum(0)
        return cls(outer_sum(x, x), outer_sum(y, x), *sums, power, len(x))

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.inputs + other.inputs,
            self.cross + other.cross,
            self.input_sum + other.input_sum,
            self.output_sum + other.output_sum,
            self.output_power + other.output_power,
            self.tokens + other.tokens,
        )

    def centred(self) -> Moments:
        """Return the moments of x and y less their means, as for a fit with a bias."""
        count = max(self.tokens, 1)
        return Moments(
            self.inputs - torch.outer(self.input_sum, self.input_sum) / count,
            self.cross - torch.outer(self.output_sum, self.input_sum) / count,
            torch.zeros_like(self.input_sum),
            torch.zeros_like(self.output_sum),
            self.output_power - self.output_sum.square() / count,
            self.tokens,
        )

    def of_columns(self, columns: Sequence[int]) -> Moments:
        """Return the moments of some of the inputs, and of all outputs."""
        return replace(
            self,
            inputs=self.inputs[columns][:, columns],
            cross=self.cross[:, columns],
            input_sum=self.input_sum[columns],
        )

    def errors(self, weight: Float[Tensor, "out width"]) -> Float[Tensor, " out"]:
        """Return the sum over tokens of (y - W x)^2, per output."""
        errors = ((weight @ self.inputs - 2 * self.cross) * weight).sum(1) + self.output_power
        return errors.clamp(min=0.0)

    def error(self, weight: Float[Tensor, "out width"]) -> float:
        """Return the sum over tokens of |y - W x|^2."""
        return float(self.errors(weight).sum())


def ridge_path(
    moments: Moments, start: Float[Tensor, "out width"], ridges: Sequence[float]
) -> Iterator[Float[Tensor, "out width"]]:
    """Yield the weights for every ridge, a fraction of the mean diagonal of E[x x^T].

    Args:
        moments: Moments of inputs and outputs, in float64.
        start: The weights that the ridge pulls towards.
        ridges: Fractions, > 0; infinity gives ``start`` itself.

    Raises:
        ValueError: If the moments are not finite.
    """
    scale, rest = _rest(moments, start)
    if scale == 0.0:
        yield from (start for _ in ridges)
        return
    values, vectors = torch.linalg.eigh(moments.inputs)
    values = values.clamp(min=0.0)
    rest = rest @ vectors
    for ridge in ridges:
        yield start + (rest / (values + max(ridge, _FLOOR) * scale)) @ vectors.T


def ridge_fit(
    moments: Moments, start: Float[Tensor, "out width"], ridge: float
) -> Float[Tensor, "out width"]:
    """Return the weights for one ridge, by a Cholesky factor; arguments as for ``ridge_path``."""
    scale, rest = _rest(moments, start)
    if scale == 0.0 or ridge == math.inf:
        return start
    ridged = moments.inputs.clone()
    ridged.diagonal().add_(max(ridge, _FLOOR) * scale)
    factor, failed = torch.linalg.cholesky_ex(ridged)
    if failed:  # products in float32 leave eigenvalues below zero
        return next(ridge_path(moments, start, [ridge]))
    return start + torch.cholesky_solve(rest.T, factor).T


def _rest(moments: Moments, start: Tensor) -> tuple[float, Tensor]:
    """Return the mean diagonal of the inputs' moment, and the cross moment left to fit."""
    if not torch.isfinite(moments.inputs).all() or not torch.isfinite(moments.cross).all():
        raise ValueError("the second moments are not finite")
    scale = float(moments.inputs.diagonal().mean()) if len(moments.inputs) else 0.0
    return scale, moments.cross - start @ moments.inputs


def best_ridge(
    fitted: Moments, judged: Moments, start: Float[Tensor, "out width"], ridges: Sequence[float]
) -> float:
    """Return the ridge whose weights, fitted on some tokens, err least on others.

    Args:
        fitted: Moments of the tokens to fit on.
        judged: Moments of the tokens that choose.
        start: The weights that the ridge pulls towards.
        ridges: Those to choose from; the first of equals wins.

    Raises:
        ValueError: If the moments are not finite.
    """
    errors = [judged.error(weight) for weight in ridge_path(fitted, start, ridges)]
    return ridges[errors.index(min(errors))]


@dataclass(frozen=True)
class HeldOutFit:
    """Weights fitted to all sequences, by the ridge that those held out chose.

    Attributes:
        weight: The weights, in float64.
        shift: The bias beside them; None without one.
        moments: Those of all sequences; with a bias, about their means.
        whole: Those of all sequences.
    """

    weight: Float[Tensor, "out width"]
    shift: Float[Tensor, " out"] | None
    moments: Moments
    whole: Moments


def fit_held_out(
    parts: tuple[Moments, Moments],
    start: Float[Tensor, "out width"],
    ridges: Sequence[float],
    biased: bool,
) -> HeldOutFit:
    """Fit weights to all sequences, as near as held-out ones allow.

    Args:
        parts: Moments of the sequences to fit on, and of the held-out ones.
        start: The weights that the ridge pulls towards, in float64.
        ridges: Those to choose from.
        biased: Whether a bias takes care of the means.

    Raises:
        ValueError: If the moments are not finite.
    """
    whole = parts[0] + parts[1]
    fitted, judged, every = (m.centred() if biased else m for m in (*parts, whole))
    weight = ridge_fit(every, start, best_ridge(fitted, judged, start, ridges))
    shift = None
    if biased:
        shift = (whole.output_sum - weight @ whole.input_sum) / max(whole.tokens, 1)
    return HeldOutFit(weight, shift, every, whole)


def held_out(count: int) -> Bool[Tensor, " count"]:
    """Mark the sequences that choose a ridge: one in ``HELD_OUT``, or the last of fewer."""
    every = torch.arange(count)
    return every % HELD_OUT == HELD_OUT - 1 if count >= HELD_OUT else every == count - 1


def removal_costs(
    gram: Float[Tensor, "width width"],
    weight: Float[Tensor, "out width"],
    blocks: Sequence[Sequence[int]],
) -> list[float]:
    """Return the costs of removing blocks of columns one after the other, the rest refitted.

    The cheapest block goes first, W_O is refitted, then the next cheapest, until none is left. The
    cost of removing block b with the others free is (Hassibi and Stork 1993, eq. 5, for a block)

        tr(W_b [(G^-1)_bb]^-1 W_b^T)

    The ridge r that G takes for the refit is no cost of a removal: r |W_b|^2 is taken off again.

    Of two equal blocks the first to go costs nothing, and the other the worth of both: no ranking
    drops both.

    Args:
        gram: Sum of x x^T, in float64.
        weight: W_O.
        blocks: Columns of every block.

    Returns:
        Per block, the highest cost of any removal up to its own.
    """
    if not gram.isfinite().all():
        raise ValueError("the second moments are not finite")
    gram, weight = gram.double(), weight.double()
    scale = REMOVAL_RIDGE * float(gram.diagonal().mean()) + torch.finfo(torch.float64).tiny
    order = torch.tensor([column for block in blocks for column in block], device=gram.device)
    ridged = gram[order[:, None], order]
    ridged.diagonal().add_(scale)
    width, inverse = len(order), torch.cholesky_inverse(torch.linalg.cholesky(ridged))
    # a removed block leaves inverse and W_O alike; of the symmetric inverse, the upper half is kept
    table = torch.cat([inverse, weight.T[order]], 1)
    ends = list(itertools.accumulate(map(len, blocks)))
    places = {b: slice(end - len(blocks[b]), end) for b, end in enumerate(ends)}
    ridge_costs = [scale * float(weight[:, block].square().sum()) for block in blocks]
    costs, highest, widest = [0.0] * len(blocks), 0.0, max(map(len, blocks), default=0)
    while places:
        # narrower blocks are filled up, with ones on the diagonal that write nothing
        needs = torch.eye(widest).to(table).repeat(len(places), 1, 1)
        outputs = table.new_zeros(len(places), widest, table.shape[1] - width)
        for at, own in enumerate(places.values()):
            size = own.stop - own.start
            needs[at, :size, :size], outputs[at, :size] = table[own, own], table[own, width:]
        needs = torch.linalg.inv(needs)
        removed = (needs * (outputs @ outputs.mT)).sum((1, 2)).tolist()
        own_costs = (cost - ridge_costs[b] for cost, b in zip(removed, places, strict=True))
        cost, best = min(zip(own_costs, places, strict=True))
        costs[best] = highest = max(highest, cost)
        need = needs[list(places).index(best)]
        own = places.pop(best)
        need = need[: own.stop - own.start, : own.stop - own.start]
        across = torch.cat([table[: own.start, own].T, table[own, own.start :]], 1)
        for place in places.values():
            change = across[:, place].T @ need
            table[place, place.start :].addmm_(change, across[:, place.start :], alpha=-1)
    return costs
