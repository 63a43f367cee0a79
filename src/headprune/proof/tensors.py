"""A part of every proof: every tensor of a result, read back, holds what stays of the original's.

It runs nothing, so it fits in any memory. It cannot show that the class of the result
computes with these tensors as the original does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headprune.errors import CheckpointError, ProofError
from headprune.io.shards import Piece, StoredTensor, bytes_between
from headprune.io.streaming import DTYPES, bytes_of, equal_bytes
from headprune.model.open import Model
from headprune.schemas.proofs import TensorProof


def compare(
    result: Model,
    pieces: Sequence[Piece],
    on_tensor: Callable[[int, int], None] = lambda done, total: None,
    changed: Callable[[str], bool] = lambda name: False,
) -> TensorProof:
    """Compare a result with the pieces of its order.

    Args:
        result: The result, read back.
        pieces: Its tensors, and what of the original each is.
        on_tensor: Called with tensors done and tensors in all.
        changed: Return whether a tensor, by its name, may hold other numbers.

    Raises:
        CheckpointError: If the folder does not load, cannot be read, or holds NaN.
        ProofError: Naming the first tensor that differs.
    """
    result.check_tensors()
    found = {**result.tensors}
    for done, piece in enumerate(pieces, start=1):
        tensor = found.pop(piece.name, None)
        may_differ = changed(piece.live or piece.name)
        if tensor is None or not (_alike(piece, tensor) and (may_differ or _same(piece, tensor))):
            raise ProofError(
                f"The proof failed: '{piece.name}', read back, is not what stays of the "
                "original's. Check the disk; if it is sound, please report this model and plan."
            )
        on_tensor(done, len(pieces))
    if found:
        raise ProofError(f"The proof failed: '{next(iter(found))}' is no tensor of the original.")
    return TensorProof(
        tensors=len(pieces),
        cut=sum(piece.kept is not None for piece in pieces),
        bytes=sum(tensor.bytes for tensor in result.tensors.values()),
    )


def _alike(piece: Piece, found: StoredTensor) -> bool:
    return (found.dtype, found.shape) == (DTYPES[piece.dtype], piece.shape)


def _same(piece: Piece, found: StoredTensor) -> bool:
    start = 0
    for block in piece.blocks():
        if block.is_floating_point() and bool(block.isnan().any()):
            raise CheckpointError(
                f"'{piece.name}' holds NaN: the checkpoint is damaged, or was cast to a type that "
                "cannot hold it. Get it again."
            )
        raw = bytes_of(block)
        if not equal_bytes(raw, bytes_between(found, start, start + len(raw))):
            return False
        start += len(raw)
    return start == found.bytes
