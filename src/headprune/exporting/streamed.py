"""From a plan to a folder without the weights in memory: cut shard by shard, and proven."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from torch import Tensor
from transformers import PreTrainedModel

from headprune import memory
from headprune.config import ProofOption
from headprune.errors import CheckpointError
from headprune.exporting.publish import (
    OnModule,
    Order,
    Pruned,
    Stage,
    counts,
    described,
    finished,
    proven_outputs,
    take_over,
    write_proven,
)
from headprune.io.outputs import whole_folder
from headprune.io.shards import Piece, write_shards
from headprune.model.loading import uneven_heads_are_known
from headprune.model.refusals import passed_over
from headprune.model.skeleton import Unmapped
from headprune.model.stored import stored_tensors
from headprune.proof import equivalence, tensors
from headprune.surgery.cut import Cut, resolve
from headprune.surgery.streamed import cut_pieces

ROOM = 1.25  # times the weights, for what they compute


@dataclass(frozen=True)
class Streaming:
    """How a cut on disk goes.

    Attributes:
        proof: What is compared.
        on_stage: Called with a few words before every stage.
        on_tensor: Called with tensors done and tensors in all.
    """

    proof: ProofOption = ProofOption.AUTO
    on_stage: Stage = lambda stage: None
    on_tensor: OnModule = lambda done, total: None

    def too_large(self, net: PreTrainedModel) -> str | None:
        """Why no outputs are compared, unless that was asked for."""
        needed = ROOM * sum(weight.nbytes for weight in net.parameters())
        free = memory.available()
        if self.proof is not ProofOption.AUTO or free is None or needed <= free:
            return None
        return (
            f"No outputs were compared: that takes {needed / 1e9:.1f} GB of memory, and "
            f"{free / 1e9:.1f} GB are free. Every tensor was (--proof tensors)."
        )


def write_streamed(
    net: PreTrainedModel,
    cuts: list[Cut],
    order: Order,
    how: Streaming,
    whole: Callable[[], PreTrainedModel],
    changed: Collection[str] = (),
) -> Pruned:
    """Cuts a checkpoint shard by shard and proves the folder.

    Where the tensors of the model are not those of the checkpoint, but fused or split when it is
    loaded, it is cut in memory.

    Args:
        net: The model without weights, uncut; afterwards it is the result, without weights.
        cuts: What it loses.
        order: What is written.
        how: How that goes.
        whole: Gives the model with its weights.
        changed: The weights that are others there than in the checkpoint.

    Raises:
        CheckpointError: If a file cannot be read or written.
        ProofError: If the result is not what it should be.
    """
    before, source = counts(net, cuts), stored_tensors(order.origin)
    too_large = None if changed else how.too_large(net)
    try:
        pieces, shape = cut_pieces(net, cuts, order.stored, source)
        if not set(changed) <= {piece.live for piece in pieces}:
            raise Unmapped("What was trained is no tensor of the checkpoint.")
    except Unmapped as why:
        if how.proof is ProofOption.TENSORS:
            raise CheckpointError(
                f"--proof tensors: {why} Such a model is cut in memory; leave out --proof."
            ) from None
        net = whole()
        return write_proven(net, _resolved(order, net), order, how.on_stage)
    facts = described(net, order, shape, before, cuts)
    expected = None
    if how.proof is not ProofOption.TENSORS and too_large is None:
        how.on_stage("probing the gated original")
        expected, held = _expected(whole(), order, changed)  # then nothing holds the model
        pieces = [_of_memory(piece, held) for piece in pieces]
    with whole_folder(order.output) as folder:
        how.on_stage("cutting shard by shard")
        with uneven_heads_are_known():
            order.stored.save(net, folder, state_dict={})
        write_shards(pieces, folder, facts["parameters"][1], order.max_shard_size, how.on_tensor)
        take_over(folder, order)
        how.on_stage("verifying the folder")
        if expected is not None:
            facts |= proven_outputs(folder, expected, None)
        else:
            facts["tensor_proof"] = tensors.compare(folder, pieces, how.on_tensor)
        pruned = finished(folder, order, facts, passed_over(net, source))
    warnings = (*pruned.warnings, *([too_large] if too_large else []))
    return replace(pruned, warnings=warnings)


def _resolved(order: Order, net: PreTrainedModel) -> list[Cut]:
    """The cuts of a model that may have other weights by now than the one the plan names."""
    return resolve(order.plan.model_copy(update={"model": None}), net, ragged=True)


def _expected(
    net: PreTrainedModel, order: Order, changed: Collection[str]
) -> tuple[equivalence.Expectation, dict[str, Tensor]]:
    """What the result must compute, and the weights that changed, as they are stored."""
    expected, _ = equivalence.expect_stored(net, _resolved(order, net), order.stored)
    parameters = dict(net.named_parameters(remove_duplicate=False))
    return expected, {name: parameters[name] for name in changed}


def _of_memory(piece: Piece, held: Mapping[str, Tensor]) -> Piece:
    """A piece of a weight that changed, which has taken up its gates."""
    weight = held.get(piece.live or "")
    if weight is None:
        return piece
    kept = None if piece.kept is None else replace(piece.kept, scale=None)
    return replace(piece, source=weight, kept=kept, computed=weight.dtype)
