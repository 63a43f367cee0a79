"""The best K and V that several heads can share, in closed form.

Every query head has its own W_Q and W_O, so any linear map on its side of a shared K or V is free.
The best shared subspace is then a truncated singular value decomposition, in the joint space of the
group's heads: r = [k_1; ...; k_n] or [v_1; ...; v_n]. Calibration gives its second moment
M = E[r r^T]; M = L L^T makes z = L^-1 r white.

    V   sum_h E|W_Oh v_h - W_Oh' s|^2 with s = B r: right singular vectors of [W_Oh E_h L]_h
    K   sum_h E(q_h^T k_h - q_h'^T s)^2, q apart from k: right singular vectors of [Q_h E_h L]_h
    K, rotary: only what commutes with the rotation can move to the queries, one complex factor
        per pair; so the same in every pair, with complex numbers and rank 1

where E_h picks head h out of r and Q_h^T Q_h = E[q_h q_h^T].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from headprune.tensors.rotary import RotaryPairs

_FLOOR = 1e-10  # of the mean variance: directions that calibration never showed


@dataclass(frozen=True)
class Shared:
    """A shared K or V.

    Attributes:
        basis: B, with k = B [k_1; ...; k_n], and v alike; shape (head_dim, heads x head_dim).
        maps: Per query head, what to multiply it with for the shared k, shape (queries, head_dim,
            head_dim), or its W_O for the shared v, shape (queries, hidden, head_dim).
        power: Of the scores, or outputs, before.
        lost: How much of it is lost.
    """

    basis: Tensor
    maps: Tensor
    power: float
    lost: float


def shared_value(
    outputs: Float[Tensor, "queries hidden head_dim"],
    owners: Sequence[int],
    moment: Float[Tensor, "joint joint"],
) -> Shared:
    """The best V for a group, and W_O to go with it.

    Args:
        outputs: W_O of the group's query heads.
        owners: For each of them, which of the group's n heads it reads.
        moment: Second moment of [v_1; ...; v_n], as the outputs see it.
    """
    width = outputs.shape[-1]
    gram = torch.einsum("qod,qoe->qde", outputs.double(), outputs.double())
    root, inverse = _root(moment.double())
    total = _gathered(gram, owners, root)
    kept = _leading(total, width)
    heads = root.unflatten(0, (-1, width))
    new = outputs.double() @ torch.stack([heads[owner] for owner in owners]) @ kept
    power, saved = float(total.trace()), float((kept.T @ total @ kept).trace())
    return Shared((kept.T @ inverse).to(outputs), new.to(outputs), power, power - saved)


def shared_key(
    query_moments: Float[Tensor, "queries head_dim head_dim"],
    owners: Sequence[int],
    moment: Float[Tensor, "joint joint"],
    pairs: RotaryPairs | None = None,
) -> Shared:
    """The best K for a group, and the maps that its queries absorb.

    Args:
        query_moments: E[q q^T] of the group's query heads.
        owners: For each of them, which of the group's n heads it reads.
        moment: Second moment of [k_1; ...; k_n], before any rotation.
        pairs: Rotated pairs of coordinates; None without a rotary embedding.
    """
    width, dtype = query_moments.shape[-1], query_moments.dtype
    moment, queries = moment.double(), query_moments.double()
    basis = moment.new_zeros(width, moment.shape[0])
    maps = moment.new_zeros(len(owners), width, width)
    power = lost = 0.0
    unpaired = (torch.arange(width) if pairs is None else pairs.unpaired).to(moment.device)
    if len(unpaired):
        joint = _joint_rows(unpaired, width, moment.shape[0] // width)
        gram = queries[:, unpaired][:, :, unpaired]
        root, inverse = _root(moment[joint][:, joint])
        total = _gathered(gram, owners, root)
        kept = _leading(total, len(unpaired))
        basis[unpaired[:, None], joint] = kept.T @ inverse
        heads = root.unflatten(0, (-1, len(unpaired)))
        for query, owner in enumerate(owners):
            maps[query][unpaired[:, None], unpaired] = (heads[owner] @ kept).T
        power += float(total.trace())
        lost += float(total.trace() - (kept.T @ total @ kept).trace())
    if pairs is not None:
        rotated = _shared_pairs(queries, owners, moment, pairs, basis, maps)
        power, lost = power + rotated[0], lost + rotated[1]
    return Shared(basis.to(dtype), maps.to(dtype), power, lost)


def _shared_pairs(
    queries: Tensor,
    owners: Sequence[int],
    moment: Tensor,
    pairs: RotaryPairs,
    basis: Tensor,
    maps: Tensor,
) -> tuple[float, float]:
    """Rank 1 per pair, all at once; writes into ``basis`` and ``maps``, returns power and loss."""
    width, n = queries.shape[-1], moment.shape[0] // queries.shape[-1]
    a, b = pairs.first.to(moment.device), pairs.second.to(moment.device)
    blocks = moment.unflatten(0, (n, width)).unflatten(2, (n, width))
    # E[k k^H] of the n complex keys of every pair, shape (pairs, n, n)
    real = blocks[:, a, :, a] + blocks[:, b, :, b]
    imaginary = blocks[:, b, :, a] - blocks[:, a, :, b]
    root, inverse = _root(torch.complex(real, imaginary))
    weight = (queries[:, a, a] + queries[:, b, b]).to(root)
    rows = root[:, list(owners)]
    total = torch.einsum("pqi,qp,pqj->pij", rows.conj(), weight, rows)
    kept = _leading(total, 1)
    b_row, c = (kept.mH @ inverse)[:, 0], (rows @ kept)[..., 0].conj().T
    joint = width * torch.arange(n, device=moment.device)
    joint_a, joint_b = a[:, None] + joint, b[:, None] + joint
    basis[a[:, None], joint_a], basis[a[:, None], joint_b] = b_row.real, -b_row.imag
    basis[b[:, None], joint_a], basis[b[:, None], joint_b] = b_row.imag, b_row.real
    # q' = conj(c) q, where k_h is nearly c_h k
    maps[:, a, a] = maps[:, b, b] = c.real
    maps[:, a, b], maps[:, b, a] = -c.imag, c.imag
    power = total.diagonal(dim1=-2, dim2=-1).real.sum()
    return float(power), float(power - (kept.mH @ total @ kept).real.sum())


def _joint_rows(coordinates: Tensor, width: int, heads: int) -> Tensor:
    first = width * torch.arange(heads, device=coordinates.device)
    return (first[:, None] + coordinates).flatten()


def _gathered(gram: Tensor, owners: Sequence[int], root: Tensor) -> Tensor:
    """sum_q L^T E_q^T gram_q E_q L, shape (joint, joint)."""
    width = gram.shape[-1]
    heads = root.unflatten(0, (-1, width))
    total = torch.zeros_like(root)
    for owner in sorted(set(owners)):
        shared = sum(gram[q] for q, other in enumerate(owners) if other == owner)
        total += heads[owner].T @ shared @ heads[owner]
    return total


def _root(moment: Tensor) -> tuple[Tensor, Tensor]:
    """L with L L^H = M, and its inverse; M may be singular, and counts as white where it is 0."""
    values, vectors = torch.linalg.eigh(moment)
    floor = values.mean(-1, keepdim=True) * _FLOOR
    values = values.maximum(floor.where(floor != 0, 1.0))[..., None, :]
    return vectors * values.sqrt(), (vectors / values.sqrt()).mH


def _leading(total: Tensor, count: int) -> Tensor:
    """The ``count`` eigenvectors of the largest eigenvalues, largest first."""
    vectors: Tensor = torch.linalg.eigh(total)[1]
    return vectors.flip(-1)[..., :count]
