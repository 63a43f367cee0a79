"""Which slices of a projection's tensors belong to which heads.

One description serves a live module and a tensor of a checkpoint on disk: name, dimension,
indices, and a factor per kept slice where a gate value is folded in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class IndexMap:
    """The slices of one tensor that stay, and what they are multiplied with.

    Attributes:
        tensor: Name of the tensor in the state dict.
        dim: Dimension that is indexed.
        indices: Kept positions along ``dim``, in their new order.
        scale: Factor per kept position, or None for 1.
    """

    tensor: str
    dim: int
    indices: Int[Tensor, " kept"]
    scale: Float[Tensor, " kept"] | None = None

    def apply(self, tensor: Tensor) -> Tensor:
        """Returns the kept slices of ``tensor``, scaled in float32 at least."""
        kept = tensor.index_select(self.dim, self.indices.to(tensor.device))
        if self.scale is None:
            return kept
        wide = torch.promote_types(tensor.dtype, torch.float32)
        shape = [-1 if d == self.dim else 1 for d in range(tensor.dim())]
        scale = self.scale.to(tensor.device, wide).view(shape)
        return (kept.to(wide) * scale).to(tensor.dtype)


def head_slices(heads: Sequence[int], head_dim: int, offset: int = 0) -> Int[Tensor, " kept"]:
    """Positions of whole heads along a dimension laid out ``(head head_dim)``.

    Args:
        heads: Head positions, in their new order.
        head_dim: Width of a head.
        offset: Where the first head starts, for fused projections.
    """
    starts = offset + torch.tensor(list(heads), dtype=torch.long) * head_dim
    return (starts[:, None] + torch.arange(head_dim)).flatten()


def projection_slices(
    holds: str,
    groups: bool,
    kept: Mapping[str, Sequence[int]],
    total: Mapping[str, int],
    head_dim: int,
) -> Int[Tensor, " kept"]:
    """Positions that stay along the head dimension of a projection.

    Args:
        holds: What the projection computes, in order: "q", "k", "v", "qkv", or "o" for the
            input of the output projection.
        groups: For "qkv": False for ``[Q; K; V]`` blocks, True for ``[q ... q k v]`` per KV head.
        kept: Kept head positions for "q", "k" and "v".
        total: Present head counts for "q", "k" and "v".
        head_dim: Width of a head.
    """
    if groups:
        size = total["q"] // max(total["k"], 1)
        slots: list[int] = []
        for group in kept["k"]:
            start = group * (size + 2)
            slots += [start + q % size for q in kept["q"] if q // size == group]
            slots += [start + size, start + size + 1]
        return head_slices(slots, head_dim)
    blocks, offset = [], 0
    for role in holds.replace("o", "q"):
        blocks.append(head_slices(kept[role], head_dim, offset))
        offset += total[role] * head_dim
    return torch.cat(blocks)
