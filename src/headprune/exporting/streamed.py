"""From a plan to a folder without the weights in memory: cut shard by shard, and proven."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from headprune import memory
from headprune.config import ProofOption
from headprune.context import Context
from headprune.errors import CheckpointError
from headprune.exporting.publish import (
    Pruned,
    WriteOrder,
    counts,
    described,
    finished,
    proven_outputs,
    take_over,
    write_proven,
)
from headprune.io.folders import hashing
from headprune.io.outputs import whole_folder
from headprune.io.shards import Piece, StoredTensor, write_shards
from headprune.model.identity import identifying
from headprune.model.loading import uneven_heads_are_known
from headprune.model.refusals import passed_over
from headprune.model.residency import residency_of, runs_by_layers, sources
from headprune.model.skeleton import Unmapped
from headprune.model.stored import stored_tensors
from headprune.placements import ROOM, Placement, asked_placement
from headprune.placements import too_large as exceeded
from headprune.proof import equivalence, tensors
from headprune.schemas.manifest import contents
from headprune.surgery.cut import Cut, resolve
from headprune.surgery.streamed import cut_pieces

PROOF_ROOM = 1.1  # times the weights, as measured: one model at a time, and a few outputs


def write_streamed(
    net: PreTrainedModel,
    cuts: list[Cut],
    order: WriteOrder,
    context: Context,
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
        context: What it runs in.
        whole: Gives the model with its weights.
        changed: The weights that are others there than in the checkpoint.

    Raises:
        CheckpointError: If a file cannot be read or written.
        ProofError: If the result is not what it should be.
    """
    before, source = counts(net, cuts), stored_tensors(order.origin)
    weights = sum(weight.nbytes for weight in net.parameters())
    too_large = None if changed else _too_large(net, source, order)
    try:
        pieces, shape = cut_pieces(net, cuts, order.stored, source)
        if not set(changed) <= {piece.live for piece in pieces}:
            raise Unmapped("What was trained is no tensor of the checkpoint.")
    except Unmapped as why:
        if order.writing.proof is ProofOption.TENSORS:
            raise CheckpointError(
                f"--config proof=tensors: {why} Such a model is cut in memory; leave out proof."
            ) from None
        net = whole()
        return write_proven(net, _resolved(order, net), order, context)
    facts = described(net, order, shape, before, cuts)
    expected = None
    if order.writing.proof is not ProofOption.TENSORS and too_large is None:
        context.stage(f"probing the gated original{_room_of(weights)}")
        probed = whole()
        expected, held = _expected(probed, order, changed)
        if residency_of(probed) is None:
            del probed  # nothing holds the model now; else its file is read from
        pieces = [_changed(piece, held) for piece in pieces]
    pruned = _written(net, pieces, order, context, facts, expected)
    warnings = (*pruned.warnings, *([too_large] if too_large else []))
    return replace(pruned, warnings=warnings)


def write_changed(
    net: PreTrainedModel, cuts: list[Cut], order: WriteOrder, context: Context
) -> Pruned:
    """Cuts a model whose weights have changed, writes it and proves the folder.

    In memory; or shard by shard, where the model runs layer by layer.

    Args:
        net: The model, uncut.
        cuts: The plan, resolved on it.
        order: What is written.
        context: What it runs in.

    Raises:
        CheckpointError: If a file cannot be read or written.
        ProofError: If the result does not compute what the gated ``net`` computes.
    """
    residency = residency_of(net)
    if residency is None:
        return write_proven(net, cuts, order, context)
    before = counts(net, cuts)
    context.stage("probing the gated original")
    expected, cuts = equivalence.expect_stored(net, cuts, order.stored)
    residency.detach()
    source = {**stored_tensors(order.origin), **residency.changed}
    try:
        pieces, shape = cut_pieces(net, cuts, order.stored, source)
    except Unmapped as why:
        raise CheckpointError(
            f"--config placement=layers: {why} Use --config placement=whole."
        ) from None
    facts = described(net, order, shape, before, cuts)
    return _written(net, pieces, order, context, facts, expected)


def write_trained(
    net: PreTrainedModel,
    trained: Mapping[str, StoredTensor],
    order: WriteOrder,
    context: Context,
    expected: equivalence.Expectation,
) -> Pruned:
    """Writes a model of which a file holds the trained weights, and proves the folder.

    Args:
        net: The model without weights; every weight is a tensor of its checkpoint.
        trained: The weights that are others by now, by their names in the model.
        order: What is written; its plan leaves the model uncut.
        context: What it runs in.
        expected: What the model computes with these weights.

    Raises:
        CheckpointError: If a file cannot be read or written.
        ProofError: If the result does not compute what is expected.
    """
    cuts, stored = _resolved(order, net), stored_tensors(order.origin)
    before, places = counts(net, cuts), sources(net, stored)
    name_of = {place: name for name, place in stored.items()}
    changed = {name_of[places[name]]: tensor for name, tensor in trained.items()}
    pieces, shape = cut_pieces(net, cuts, order.stored, {**stored, **changed})
    facts = described(net, order, shape, before, cuts)
    return _written(net, pieces, order, context, facts, expected)


def _written(
    net: PreTrainedModel,
    pieces: list[Piece],
    order: WriteOrder,
    context: Context,
    facts: dict[str, Any],
    expected: equivalence.Expectation | None,
) -> Pruned:
    """Writes the tensors of a result, and compares outputs, or tensors where none are expected."""
    with identifying(order.origin) as parent, whole_folder(order.output) as folder:
        context.stage("cutting shard by shard")
        with uneven_heads_are_known():
            order.stored.save(net, folder, state_dict={})
        write_shards(
            pieces, folder, facts["parameters"][1], order.writing.max_shard_size, context.step
        )
        take_over(folder, order, vars(net).get("generation_config"))
        context.stage("verifying the folder")
        with hashing(folder, contents(folder)) as files:
            if expected is not None:
                facts |= proven_outputs(folder, expected, None)
            else:
                facts["tensor_proof"] = tensors.compare(folder, pieces, context.step)
            facts |= {"parent": parent(), "files": files()}
        return finished(folder, order, facts, passed_over(net, stored_tensors(order.origin)))


def _room_of(weights: int) -> str:
    """How much memory a proof takes, for the stage; nothing where little, or a layer at a time.

    Args:
        weights: Bytes of the weights, in the element type that they are computed in.
    """
    placement, takes = asked_placement(), PROOF_ROOM * weights / 1e9
    layers = placement is Placement.LAYERS
    if layers or (placement is Placement.AUTO and exceeded(weights)) or takes < 0.1:
        return ""
    return f" (takes about {takes:.1f} GB of memory)"


def _too_large(
    net: PreTrainedModel, tensors: Mapping[str, StoredTensor], order: WriteOrder
) -> str | None:
    """Why no outputs are compared, unless that was asked for, or goes layer by layer."""
    needed = ROOM * sum(weight.nbytes for weight in net.parameters())
    free = memory.available()
    if order.writing.proof is not ProofOption.AUTO or free is None or needed <= free:
        return None
    if asked_placement() is not Placement.WHOLE and runs_by_layers(net, tensors):
        return None
    return (
        f"No outputs were compared: that takes {needed / 1e9:.1f} GB of memory, and "
        f"{free / 1e9:.1f} GB are free. Every tensor was (--config proof=tensors)."
    )


def _resolved(order: WriteOrder, net: PreTrainedModel) -> list[Cut]:
    """The cuts of a model that may have other weights by now than the one the plan names."""
    return resolve(order.plan.model_copy(update={"model": None}), net, ragged=True)


def _expected(
    net: PreTrainedModel, order: WriteOrder, changed: Collection[str]
) -> tuple[equivalence.Expectation, dict[str, Tensor | StoredTensor]]:
    """What the result must compute, and the weights that changed, as they are stored."""
    expected, _ = equivalence.expect_stored(net, _resolved(order, net), order.stored)
    residency = residency_of(net)
    held: Mapping[str, Tensor | StoredTensor] = dict(net.named_parameters(remove_duplicate=False))
    if residency is not None:
        held = residency.written()
    return expected, {name: held[name] for name in changed if name in held}


def _changed(piece: Piece, held: Mapping[str, Tensor | StoredTensor]) -> Piece:
    """A piece of a weight that changed, which has taken up its gates."""
    weight = held.get(piece.live or "")
    if weight is None:
        return piece
    kept = None if piece.kept is None else replace(piece.kept, scale=None)
    computed = weight.dtype if isinstance(weight, Tensor) else piece.computed
    return replace(piece, source=weight, kept=kept, computed=computed)
