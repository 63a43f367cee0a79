"""Slices of a projection's tensors by head.

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
    """The slices of one tensor that stay, and their factors.

    Attributes:
        tensor: Name of the tensor in the state dict.
        dim: Indexed dimension.
        indices: FractionOrCount positions along ``dim``, in their new order.
        scale: Factor per kept position, or None for 1.
    """

    tensor: str
    dim: int
    indices: Int[Tensor, " kept"]
    scale: Float[Tensor, " kept"] | None = None

    def apply(self, tensor: Tensor) -> Tensor:
        """Returns the kept slices of ``tensor``, scaled in float32 at least."""
        return self.scaled(self.selected(tensor))

    def selected(self, tensor: Tensor) -> Tensor:
        """Returns the kept slices of ``tensor``."""
        return tensor.index_select(self.dim, self.indices.to(tensor.device))

    def scaled(self, kept: Tensor) -> Tensor:
        """Returns kept slices, scaled in float32 at least."""
        if self.scale is None:
            return kept
        wide = torch.promote_types(kept.dtype, torch.float32)
        shape = [-1 if d == self.dim else 1 for d in range(kept.dim())]
        scale = self.scale.to(kept.device, wide).view(shape)
        return (kept.to(wide) * scale).to(kept.dtype)


def role_slices(
    roles: str, interleaved: bool, total: Mapping[str, int], head_dim: int
) -> dict[str, Int[Tensor, "heads head_dim"]]:
    """Places of every head of every role along the head dimension of a projection.

    Args:
        roles: Roles of the projection, in order: "q", "k", "v", "qkv", or "o" for the
            input of the output projection.
        interleaved: For "qkv": False for ``[Q; K; V]`` blocks, True for ``[q ... q k v]`` per KV
            head.
        total: Present head counts for "q", "k" and "v".
        head_dim: Width of a head.
    """
    if interleaved:
        size, group = total["q"] // max(total["k"], 1), torch.arange(total["k"])
        slots = {
            "q": torch.arange(total["q"]) + 2 * (torch.arange(total["q"]) // max(size, 1)),
            "k": group * (size + 2) + size,
            "v": group * (size + 2) + size + 1,
        }
    else:
        slots, start = {}, 0
        for role in roles:
            count = total[role.replace("o", "q")]
            slots[role] = start + torch.arange(count)
            start += count
    within = torch.arange(head_dim)
    return {role: slot[:, None] * head_dim + within for role, slot in slots.items()}


def projection_slices(
    roles: str,
    interleaved: bool,
    kept: Mapping[str, Sequence[int]],
    total: Mapping[str, int],
    head_dim: int,
    group_sizes: Sequence[int] = (),
) -> Int[Tensor, " kept"]:
    """Positions that stay along the head dimension of a projection, in their new order.

    Args:
        roles: As in ``role_slices``.
        interleaved: As in ``role_slices``.
        kept: FractionOrCount head positions for "q", "k" and "v", in their new order.
        total: Present head counts for "q", "k" and "v".
        head_dim: Width of a head.
        group_sizes: Where ``interleaved`` is set: kept query heads of every kept KV head, in order.
    """
    present = role_slices(roles, interleaved, total, head_dim)
    if not interleaved:
        parts = [present[role][list(kept[role.replace("o", "q")])] for role in roles]
        return torch.cat(parts).flatten()
    parts, start = [], 0
    for kv_head, size in zip(kept["k"], group_sizes, strict=True):
        parts.append(present["q"][list(kept["q"][start : start + size])])
        parts += [present["k"][[kv_head]], present["v"][[kv_head]]]
        start += size
    return torch.cat(parts).flatten() if parts else torch.arange(0)
