"""From a plan to a folder without the weights in memory: cut shard by shard, and proven."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from headprune import memory
from headprune.config import ProofOption
from headprune.errors import CheckpointError
from headprune.export.publish import (
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
from headprune.io.shards import write_shards
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
) -> Pruned:
    """Cuts a checkpoint shard by shard and proves the folder.

    Where the tensors of the model are not those of the checkpoint, but fused or split when it is
    loaded, it is cut in memory.

    Args:
        net: The model without weights, uncut; afterwards it is the result, without weights.
        cuts: What it loses.
        order: What is written.
        how: How that goes.
        whole: Loads the model with its weights.

    Raises:
        CheckpointError: If a file cannot be read or written.
        ProofError: If the result is not what it should be.
    """
    before, source = counts(net, cuts), stored_tensors(order.origin)
    too_large, expected = how.too_large(net), None
    try:
        pieces, shape = cut_pieces(net, cuts, order.stored, source)
    except Unmapped as why:
        if how.proof is ProofOption.TENSORS:
            raise CheckpointError(
                f"--proof tensors: {why} Such a model is cut in memory; leave out --proof."
            ) from None
        net = whole()
        return write_proven(net, resolve(order.plan, net, ragged=True), order, how.on_stage)
    facts = described(net, order, shape, before, cuts)
    if how.proof is not ProofOption.TENSORS and too_large is None:
        how.on_stage("probing the gated original")
        expected = _expected(whole(), order)  # nothing holds the model when that is done
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


def _expected(net: PreTrainedModel, order: Order) -> equivalence.Expectation:
    cuts = resolve(order.plan, net, ragged=True)
    return equivalence.expect_stored(net, cuts, order.stored)[0]
