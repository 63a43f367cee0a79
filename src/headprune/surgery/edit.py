"""An edit: the heads that stay, their groups, and the replaced tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.io.shards import StoredTensor, rows_of
from headprune.model.open import Model
from headprune.model.residency import residency_of
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.plan import Plan
from headprune.surgery.cut import Cut, computing_as, cut_heads, resolve

Tensors = Mapping[str, Tensor | StoredTensor]


@dataclass(frozen=True)
class Edit:
    """A change to a model, which can be tried in memory and written.

    Attributes:
        plan: The heads that stay, and the KV heads that share.
        tensors: Replaced weights by their names in the model, in the shapes of the uncut model.
    """

    plan: Plan
    tensors: Tensors = field(default_factory=dict)

    def cuts(self, net: PreTrainedModel) -> list[Cut]:
        """Return the cut of every attention module.

        The weights may be replaced, so that the plan's fingerprint says nothing here.
        """
        return resolve(self.plan.model_copy(update={"model": None}), net, ragged=True)


@contextmanager
def trying(net: PreTrainedModel, edit: Edit) -> Iterator[list[Cut]]:
    """Have a model compute as the edited one does, for the time of a ``with`` block.

    Replaced weights are swapped in, heads that go are gated, and windows are masks per head.
    Nothing is copied.
    """
    with replaced(net, edit.tensors):
        cuts = edit.cuts(net)
        with computing_as(cuts, [cut.gate() for cut in cuts]):
            yield cuts


def put(net: PreTrainedModel, tensors: Tensors) -> Callable[[], None]:
    """Put other weights in the place of some, wherever they are tied.

    Returns:
        Puts the former weights back.
    """
    places: dict[int, list[str]] = {}
    for full, parameter in net.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(full)
    former: list[tuple[nn.Module, str, nn.Parameter | None]] = []
    for name, value in tensors.items():
        old = net.get_parameter(name)
        tensor = value if isinstance(value, Tensor) else rows_of(value)
        new = nn.Parameter(tensor.detach().to(old.device, old.dtype), old.requires_grad)
        for full in places[id(old)]:
            owner, _, last = full.rpartition(".")
            parameters = net.get_submodule(owner)._parameters
            former.append((net.get_submodule(owner), last, parameters[last]))
            parameters[last] = new

    def undo() -> None:
        for module, last, parameter in reversed(former):
            module._parameters[last] = parameter

    return undo


@contextmanager
def replaced(net: PreTrainedModel, tensors: Tensors) -> Iterator[None]:
    """Swap weights of a model for the time of a ``with`` block."""
    residency, coming = residency_of(net), set[str]()
    within: AbstractContextManager[None] = nullcontext()
    if residency is not None:  # weights of blocks are on the meta device until these run
        coming = {name for name in tensors if net.get_parameter(name).is_meta}
        within = residency.replaced({name: tensors[name] for name in coming})
    undo = put(net, {name: tensor for name, tensor in tensors.items() if name not in coming})
    try:
        with within:
            yield
    finally:
        undo()


@contextmanager
def collecting(
    net: PreTrainedModel, attentions: Sequence[Attention]
) -> Iterator[dict[str, Tensor | StoredTensor]]:
    """Collect the attention weights that a ``with`` block writes, and undo it at the end.

    Yields:
        The changed weights by name, once the block has ended.
    """
    changed: dict[str, Tensor | StoredTensor] = {}
    residency = residency_of(net)
    if residency is not None:
        with residency.collecting(changed):
            yield changed
        return
    former = {
        f"{projection.path}.{name}": parameter.detach()
        for attention in attentions
        for projection in attention.projections
        for name, parameter in projection.module.named_parameters()
    }
    undo = put(net, {name: weight.clone() for name, weight in former.items()})
    try:
        yield changed
        for name, weight in former.items():
            now = net.get_parameter(name).detach()
            if not torch.equal(now, weight):
                changed[name] = now
    finally:
        undo()


def written(net: PreTrainedModel, names: Sequence[str]) -> dict[str, Tensor | StoredTensor]:
    """Return some weights as they are now; those of blocks that come and go as they are kept."""
    residency = residency_of(net)
    kept = {} if residency is None else residency.written()
    return {name: kept.get(name) or net.get_parameter(name).detach() for name in names}


def meta_model(model: Model, edit: Edit) -> PreTrainedModel:
    """Return the edited model on the meta device, to read its sizes off."""
    net = model.skeleton
    memo = {id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in net.parameters()}
    copied: PreTrainedModel = copy.deepcopy(net, memo)
    cut_heads(copied, edit.cuts(copied))
    return copied
