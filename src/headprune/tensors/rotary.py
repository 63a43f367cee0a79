"""The rotary embedding as rotations of planes, whichever coordinates a model pairs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Planes:
    """Which coordinates of a head turn together.

    Attributes:
        first: The coordinate that is the real part, per plane.
        second: The one that is the imaginary part, per plane.
        head_dim: Width of a head; coordinates in no plane do not turn.
    """

    first: Int[Tensor, " planes"]
    second: Int[Tensor, " planes"]
    head_dim: int

    @staticmethod
    def halves(width: int, head_dim: int) -> Planes:
        """Coordinate j with j + width/2, as in Llama."""
        j = torch.arange(width // 2)
        return Planes(j, j + width // 2, head_dim)

    @staticmethod
    def interleaved(width: int, head_dim: int) -> Planes:
        """Coordinate 2j with 2j + 1, as in Cohere and GPT-J."""
        j = torch.arange(width // 2)
        return Planes(2 * j, 2 * j + 1, head_dim)

    @property
    def still(self) -> Int[Tensor, " rest"]:
        """Coordinates that do not turn."""
        turning = torch.cat([self.first, self.second])
        every = torch.arange(self.head_dim)
        return every[~torch.isin(every, turning)]

    def complex(
        self, rows: Float[Tensor, "*batch head_dim columns"]
    ) -> Complex[Tensor, "*batch planes columns"]:
        """The planes' rows of a projection as complex rows."""
        return torch.complex(rows[..., self.first, :], rows[..., self.second, :])

    def put(
        self,
        rows: Float[Tensor, "*batch head_dim columns"],
        planes: Complex[Tensor, "*batch planes columns"],
    ) -> None:
        """Writes complex rows back into ``rows``."""
        rows[..., self.first, :], rows[..., self.second, :] = planes.real, planes.imag


@dataclass(frozen=True)
class Rotation:
    """The rotary embedding over some positions.

    Attributes:
        planes: The coordinates that turn together.
        cos: Cosine per position and plane, with whatever factor the model scales it by.
        sin: Sine, the same.
    """

    planes: Planes
    cos: Float[Tensor, "length planes"]
    sin: Float[Tensor, "length planes"]

    def apply(self, x: Float[Tensor, "*batch length head_dim"]) -> Tensor:
        """Turns every position by its angles."""
        return self._turned(x, self.sin)

    def transposed(self, x: Float[Tensor, "*batch length head_dim"]) -> Tensor:
        """The transpose of ``apply``: turns back, but for the scaling."""
        return self._turned(x, -self.sin)

    def _turned(self, x: Tensor, sin: Tensor) -> Tensor:
        real, imaginary = x[..., self.planes.first], x[..., self.planes.second]
        turned = x.clone()
        turned[..., self.planes.first] = real * self.cos - imaginary * sin
        turned[..., self.planes.second] = imaginary * self.cos + real * sin
        return turned
