"""Least squares without the matrix."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor], start: Tensor, rest: Tensor, steps: int
) -> Tensor:
    """Solves ``apply(x) = right`` for a symmetric positive operator, in a few steps from ``start``.

    Entries along the first dimension are problems of their own, each with its own step lengths.
    Each step lowers the quadratic x.apply(x)/2 - right.x, so that stopping early is safe.

    Args:
        apply: The operator.
        start: Where to start.
        rest: The residual there: right - apply(start).
        steps: Number of steps.
    """
    x, direction, size = start, rest, _dot(rest, rest)
    for _ in range(steps):
        image = apply(direction)
        curvature = _dot(direction, image)
        length = (size / curvature.clamp(min=1e-30)).where(curvature > 0, 0)
        x, rest = x + length * direction, rest - length * image
        new = _dot(rest, rest)
        direction = rest + (new / size.clamp(min=1e-30)) * direction
        size = new
    return x


def _dot(a: Tensor, b: Tensor) -> Tensor:
    product = (a * b).flatten(1).sum(1)
    return product.view(-1, *[1] * (a.dim() - 1))
