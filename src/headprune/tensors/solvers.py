"""Least squares without the matrix."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor], right: Tensor, start: Tensor, steps: int
) -> Tensor:
    """Solves ``apply(x) = right`` for a symmetric positive operator, in a few steps from ``start``.

    Each step lowers the quadratic x.apply(x)/2 - right.x, so that stopping early is safe.
    """
    x = start
    rest = right - apply(x)
    direction, size = rest, float((rest * rest).sum())
    for _ in range(steps):
        if size <= 0:
            break
        image = apply(direction)
        curvature = float((direction * image).sum())
        if curvature <= 0:
            break
        length = size / curvature
        x, rest = x + length * direction, rest - length * image
        new = float((rest * rest).sum())
        direction, size = rest + new / size * direction, new
    return x
