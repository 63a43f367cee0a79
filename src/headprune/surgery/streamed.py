"""A cut of a checkpoint on disk: the tensors of the result, each a part of one that is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from transformers import PreTrainedModel

from headprune.io.shards import Piece, StoredTensor
from headprune.model.attention import family_of
from headprune.model.skeleton import Names, stored_as
from headprune.model.stored import StoredDtypes
from headprune.schemas.plan import Shape
from headprune.surgery.cut import Cut, cut_heads, index_maps


def cut_pieces(
    net: PreTrainedModel,
    cuts: Sequence[Cut],
    stored: StoredDtypes,
    tensors: Mapping[str, StoredTensor],
) -> tuple[list[Piece], Shape]:
    """Cut a model without weights; return the source of every tensor of the result.

    Args:
        net: The model, on the meta device; it becomes the result, in its element types.
        cuts: The heads that go.
        stored: The element types to write.
        tensors: The tensors of its checkpoint.

    Returns:
        The tensors in their order, and how the result must be stored.

    Raises:
        Unmapped: If a cut tensor is no tensor of the checkpoint, but fused or split when the model
            is loaded.
    """
    before, old = Names.of(net), _state(net)
    types = {name: tensor.dtype for name, tensor in old.items()}
    family = family_of(net.config)
    maps = {each.tensor: each for cut in cuts for each in index_maps(cut, family)}
    for name in maps:
        before.source(net, name, tensors)
    shape = cut_heads(net, cuts)
    stored.cast(net)
    names = {id(tensor): name for name, tensor in old.items()}
    was = {  # entries of lists are counted anew where some are gone
        name: name if name in maps or old.get(name) is tensor else names[id(tensor)]
        for name, tensor in _state(net).items()
    }
    after, pieces = Names.of(net), list[Piece]()
    live: dict[str, str] = {disk: name for name, disk in after.disk.items()}
    for disk, tensor in after.tensors.items():
        size = tuple(tensor.shape)
        if disk not in live:  # one of several in a single, uncut tensor of the model
            source, computed = stored_as(net, disk, size, tensors), before.tensors[disk].dtype
            pieces.append(Piece(disk, None, source, None, computed, tensor.dtype))
        else:
            name = was[live[disk]]
            source, kept = before.source(net, name, tensors), maps.get(live[disk])
            pieces.append(Piece(disk, name, source, kept, types[name], tensor.dtype))
        assert pieces[-1].shape == size
    return pieces, shape


def _state(net: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of a model themselves."""
    state: dict[str, Tensor] = net.state_dict(keep_vars=True)
    return state
