"""What other tools do to choose heads and to make up for them, at equal head counts.

Each is written from its paper, over query heads, and gets the same tokens as ours. Where a method
has a compensation of its own it is applied. None trains a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.data.samples import CalibrationSample
from headprune.evidence.criteria import UnitEvidence
from headprune.evidence.losses import example_losses
from headprune.model.batch import doubled, real_tokens, token_mask
from headprune.model.heads import project_output, read_output
from headprune.model.loading import task_of
from headprune.model.streams import OneStream, Stream, in_sequence
from headprune.runtime.modeling_headprune import Attention, input_dim
from headprune.tensors.index_maps import role_slices


@dataclass(frozen=True)
class Rival:
    """A published method.

    Attributes:
        criterion: The criterion of ours that is its criterion; "taylor" for the one that is none.
        source: Where it is published.
        normalised: Whether scores are divided by their L2 norm in every layer, as in the paper.
        compensate: From model, modules, gates and data to gates, and a context in which the model
            runs with its compensation; None for a method without.
    """

    criterion: str
    source: str
    normalised: bool = False
    compensate: Compensate | None = None


Gates = list[Tensor]
Compensate = Callable[
    [PreTrainedModel, Sequence[Attention], Gates, CalibrationSample, Sequence[UnitEvidence]],
    tuple[Gates, AbstractContextManager[None]],
]


def taylor(
    net: PreTrainedModel, attentions: Sequence[Attention], examples: CalibrationSample
) -> list[Tensor]:
    """LLM-Pruner's first-order Taylor importance: sum of |w dL/dw| over all weights of a head."""
    parameters = {
        (a.path, p.path): p.module.get_parameter("weight")
        for a in attentions
        for p in a.projections
    }
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
        parameter.grad = None
    batches = examples.batches()
    for batch in batches:
        (example_losses(net, task_of(net), batch).mean() / len(batches)).backward()
    found = []
    for attention in attentions:
        scores = torch.zeros(attention.query_heads, dtype=torch.float64)
        for projection in attention.projections:
            if not projection.holds:
                continue
            weight = parameters[attention.path, projection.path]
            assert weight.grad is not None
            salience = (weight * weight.grad).detach().abs().double()
            inputs = input_dim(projection.module)
            along = salience.sum(1 - inputs if projection.holds == "o" else inputs)
            total = {"q": attention.query_heads, "k": attention.kv_heads, "v": attention.kv_heads}
            slices = role_slices(projection.holds, projection.groups, total, projection.head_dim)
            for role, rows in slices.items():
                per_head = along[rows].sum(1)
                if role in ("q", "o"):
                    scores += per_head
                else:  # a shared K or V counts for each of its queries alike
                    owners = [
                        k for k, size in enumerate(attention.group_sizes) for _ in range(size)
                    ]
                    shares = torch.tensor([attention.group_sizes[k] for k in owners])
                    scores += per_head[owners] / shares
        found.append(scores)
    for parameter in parameters.values():
        parameter.requires_grad_(False)
        parameter.grad = None
    return found


def mean_for_gone(
    net: PreTrainedModel,
    attentions: Sequence[Attention],
    gates: Gates,
    examples: CalibrationSample,
    evidence: Sequence[UnitEvidence],
) -> tuple[Gates, AbstractContextManager[None]]:
    """FLAP's bias compensation: what a removed head gives in the mean is added as a bias."""
    handles = []
    for attention, gate, seen in zip(attentions, gates, evidence, strict=True):
        assert seen.activations is not None
        mean = (seen.activations.sums / max(seen.activations.tokens, 1)).float()
        heads, _ = read_output(attention)
        bias = torch.einsum("hod,hd,h->o", heads, mean, (gate == 0).float())

        def hook(module: nn.Module, args: object, output: Tensor, bias: Tensor = bias) -> Tensor:
            return output + bias

        handles.append(attention.output_projection.register_forward_hook(hook))
    return gates, _Handles(handles)


def tuned_masks(
    net: PreTrainedModel,
    attentions: Sequence[Attention],
    gates: Gates,
    examples: CalibrationSample,
    evidence: Sequence[UnitEvidence],
) -> tuple[Gates, AbstractContextManager[None]]:
    """Kwon et al.'s mask tuning: one factor per kept head, least squares, layer after layer."""
    batch = examples.whole()
    tuned = {a.path: gate.clone() for a, gate in zip(attentions, gates, strict=True)}

    def enter(attention: Attention, x: Tensor) -> OneStream:
        gate, changed = tuned[attention.path], Stream.CHANGED.of(x)
        wanted = project_output(attention, Stream.ORIGINAL.of(x))
        kept = gate.nonzero().flatten()
        if len(kept):
            heads, bias = read_output(attention)
            mask = token_mask(batch, attention.kind)
            rows = real_tokens(changed, mask).unflatten(-1, (len(gate), -1))
            goal = real_tokens(wanted if bias is None else wanted - bias, mask)
            given = torch.einsum("thd,hod->hto", rows[:, kept], heads[kept])
            moment = torch.einsum("hto,jto->hj", given, given).double()
            cross = torch.einsum("hto,to->h", given, goal).double()
            ridge = 1e-3 * moment.diagonal().mean()
            rest = cross - moment.sum(1)  # towards factors of 1
            change = torch.linalg.solve(moment + ridge * torch.eye(len(kept)).double(), rest)
            # as in their code: factors that run away are taken for a failed fit
            if bool(change.abs().max() < 10):
                gate[kept] = (1 + change).float()
        mine = (changed.unflatten(-1, (len(gate), -1)) * gate[:, None]).flatten(-2)
        return OneStream(Stream.CHANGED, mine, wanted)

    in_sequence(net, attentions, doubled(batch), enter)
    return [tuned[a.path] for a in attentions], nullcontext()


class _Handles(AbstractContextManager[None]):
    def __init__(self, handles: list[torch.utils.hooks.RemovableHandle]) -> None:
        self.handles = handles

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()


RIVALS = {
    "Michel et al.": Rival("gradient", "arXiv 1905.10650, section 4.1", normalised=True),
    "FLAP": Rival("fluctuation", "arXiv 2312.11983", compensate=mean_for_gone),
    "LLM-Pruner": Rival("taylor", "arXiv 2305.11627"),
    "Wanda over heads": Rival("wanda", "arXiv 2306.11695"),
    "Kwon et al.": Rival(
        "fisher", "arXiv 2204.09656, without its rearrangement", compensate=tuned_masks
    ),
}
