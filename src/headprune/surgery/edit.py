"""An edit: the heads that stay, their groups, and the tensors that are replaced."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.io.shards import StoredTensor, rows_of
from headprune.model.gating import fixed, gated
from headprune.model.open import Model
from headprune.model.residency import residency_of
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.plan import Plan
from headprune.surgery.cut import Cut, cut_heads, resolve

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

    Replaced weights are swapped in, and the heads that go are gated. Nothing is copied.
    """
    with replaced(net, edit.tensors):
        cuts = edit.cuts(net)
        with gated([cut.attention for cut in cuts], fixed([cut.gate() for cut in cuts])):
            yield cuts


@contextmanager
def replaced(net: PreTrainedModel, tensors: Tensors) -> Iterator[None]:
    """Swap weights of a model for the time of a ``with`` block."""
    residency, swapped = residency_of(net), {name: net.get_parameter(name) for name in tensors}
    within: AbstractContextManager[None] = nullcontext()
    if residency is not None:  # weights of blocks are on the meta device until these run
        coming = {name for name, parameter in swapped.items() if parameter.is_meta}
        within = residency.replaced({name: tensors[name] for name in coming})
        swapped = {name: swapped[name] for name in swapped.keys() - coming}
    former = {name: parameter.data for name, parameter in swapped.items()}
    for name, parameter in swapped.items():
        value = tensors[name]
        value = value if isinstance(value, Tensor) else rows_of(value)
        parameter.data = value.detach().to(parameter.device, parameter.dtype)
    try:
        with within:
            yield
    finally:
        for name, parameter in swapped.items():
            parameter.data = former[name]


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
    parameters = {
        f"{projection.path}.{name}": parameter
        for attention in attentions
        for projection in attention.projections
        for name, parameter in projection.module.named_parameters()
    }
    former = {name: parameter.data for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.data = parameter.data.clone()
    try:
        yield changed
        for name, parameter in parameters.items():
            if not torch.equal(parameter.data, former[name]):
                changed[name] = parameter.data
    finally:
        for name, parameter in parameters.items():
            parameter.data = former[name]


def written(net: PreTrainedModel, names: Sequence[str]) -> dict[str, Tensor | StoredTensor]:
    """Return some weights as they are now; those of blocks that come and go as they are kept."""
    residency = residency_of(net)
    kept = {} if residency is None else residency.written()
    return {name: kept.get(name) or net.get_parameter(name).data for name in names}


def sketch(model: Model, edit: Edit) -> PreTrainedModel:
    """Return the edited model on the meta device, to read its sizes off."""
    net = model.skeleton
    memo = {id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in net.parameters()}
    copied: PreTrainedModel = copy.deepcopy(net, memo)
    cut_heads(copied, edit.cuts(copied))
    return copied
