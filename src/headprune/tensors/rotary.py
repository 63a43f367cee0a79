"""The rotary embedding as rotations of pairs of any coordinates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class RotaryPairs:
    """Coordinates of a head that rotate together.

    Attributes:
        first: The coordinate that is the real part, per pair.
        second: The one that is the imaginary part, per pair.
        head_dim: Width of a head; coordinates in no pair do not rotate.
    """

    first: Int[Tensor, " pairs"]
    second: Int[Tensor, " pairs"]
    head_dim: int

    @staticmethod
    def halves(width: int, head_dim: int, device: torch.device | str | None = None) -> RotaryPairs:
        """Coordinate j with j + width/2, as in Llama."""
        j = torch.arange(width // 2, device=device)
        return RotaryPairs(j, j + width // 2, head_dim)

    @staticmethod
    def interleaved(
        width: int, head_dim: int, device: torch.device | str | None = None
    ) -> RotaryPairs:
        """Coordinate 2j with 2j + 1, as in Cohere and GPT-J."""
        j = torch.arange(width // 2, device=device)
        return RotaryPairs(2 * j, 2 * j + 1, head_dim)

    @property
    def unpaired(self) -> Int[Tensor, " rest"]:
        """Coordinates that do not rotate."""
        paired = torch.cat([self.first, self.second])
        every = torch.arange(self.head_dim, device=self.first.device)
        return every[~torch.isin(every, paired)]


@dataclass(frozen=True)
class Rotation:
    """The rotary embedding over some positions.

    Attributes:
        pairs: The coordinates that rotate together.
        cos: Cosine per position and pair, with whatever factor the model scales it by.
        sin: Sine, the same.
    """

    pairs: RotaryPairs
    cos: Float[Tensor, "length pairs"]
    sin: Float[Tensor, "length pairs"]

    def rotate(self, x: Float[Tensor, "*batch length head_dim"]) -> Tensor:
        """Rotates every position by its angles."""
        return self._rotated(x, self.sin)

    def transposed(self, x: Float[Tensor, "*batch length head_dim"]) -> Tensor:
        """The transpose of ``rotate``: rotates back, but for the scaling."""
        return self._rotated(x, -self.sin)

    def _rotated(self, x: Tensor, sin: Tensor) -> Tensor:
        real, imaginary = x[..., self.pairs.first], x[..., self.pairs.second]
        rotated = x.clone()
        rotated[..., self.pairs.first] = real * self.cos - imaginary * sin
        rotated[..., self.pairs.second] = imaginary * self.cos + real * sin
        return rotated
