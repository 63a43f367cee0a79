"""What other tools do to choose heads and to make up for them, at equal head counts.

Each is written from its paper, over query heads, and gets as many tokens as ours are fitted to.
Where a method has a compensation of its own it is applied. None trains a weight. ``RIVALS`` score
all heads, and ``CUTTERS`` choose on their way through the layers, or choose layers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headprune.config import ScoreConfig
from headprune.data.text import Sequences
from headprune.evidence.criteria import columns
from headprune.evidence.losses import example_losses
from headprune.evidence.score import gather, scores_of
from headprune.evidence.statistics import Statistics
from headprune.model.attention import attention_of
from headprune.model.batch import doubled, real_tokens, token_mask
from headprune.model.heads import project_output, read_output, write_output
from headprune.model.loading import task_of
from headprune.model.passes import OneStream, Stream, in_sequence, run_model
from headprune.runtime.modeling_headprune import Attention, input_dim
from headprune.tensors.index_maps import role_slices
from headprune.tensors.least_squares import outer_sum
from headprune.tensors.selection import keep_best
from headprune.tensors.units import Unit


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
    [PreTrainedModel, Sequence[Attention], Gates, Sequences, Sequence[Statistics]],
    tuple[Gates, AbstractContextManager[Any]],
]


def taylor(
    net: PreTrainedModel, attentions: Sequence[Attention], examples: Sequences
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
    examples: Sequences,
    evidence: Sequence[Statistics],
) -> tuple[Gates, AbstractContextManager[Any]]:
    """FLAP's bias compensation: what a removed head gives in the mean is added as a bias."""
    handles = []
    for attention, gate, seen in zip(attentions, gates, evidence, strict=True):
        mean = (seen.activations.sums / max(seen.activations.tokens, 1)).float()
        heads, _ = read_output(attention)
        bias = torch.einsum("hod,hd,h->o", heads, mean, (gate == 0).float())

        def hook(module: nn.Module, args: object, output: Tensor, bias: Tensor = bias) -> Tensor:
            return output + bias.to(output.dtype)

        handles.append(attention.output_projection.register_forward_hook(hook))
    return gates, _Handles(handles)


def tuned_masks(
    net: PreTrainedModel,
    attentions: Sequence[Attention],
    gates: Gates,
    examples: Sequences,
    evidence: Sequence[Statistics],
) -> tuple[Gates, AbstractContextManager[Any]]:
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


Choose = Callable[[Callable[[Sequence[int]], float], int, int], Sequence[int]]


def greedily(loss: Callable[[Sequence[int]], float], heads: int, count: int) -> Sequence[int]:
    """The heads that go: one after the other, the one whose loss is least beside those gone."""
    gone: list[int] = []
    for _ in range(count):
        left = [head for head in range(heads) if head not in gone]
        gone.append(min(left, key=lambda head: loss([*gone, head])))
    return gone


def best_subset(loss: Callable[[Sequence[int]], float], heads: int, count: int) -> Sequence[int]:
    """The heads that go: of all subsets the best, which a local search can at most find."""
    return min(itertools.combinations(range(heads), count), key=loss)


def slimgpt(
    net: PreTrainedModel, attentions: Sequence[Attention], share: float, examples: Sequences
) -> tuple[Gates, AbstractContextManager[Any]]:
    """SlimGPT: greedy removal with the OBS update, of more heads in later layers.

    How the share of heads that go grows is our choice: with the logarithm of the depth, from
    nothing in the first layer.
    """
    heads = [a.query_heads for a in attentions]
    growing = [count * math.log(layer) for layer, count in enumerate(heads, 1)]
    total = round((1 - share) * sum(heads))
    upto = [round(total * part / sum(growing)) for part in itertools.accumulate(growing)]
    gone = [now - before for before, now in itertools.pairwise([0, *upto])]
    return _layer_by_layer(net, attentions, gone, examples, greedily)


def osscar(
    net: PreTrainedModel, attentions: Sequence[Attention], share: float, examples: Sequences
) -> tuple[Gates, AbstractContextManager[Any]]:
    """OSSCAR: of every layer the same share, those heads without which a refit misses least."""
    total = sum(a.query_heads for a in attentions)
    kept = equal_shares(attentions, round(share * total))
    gone = [a.query_heads - count for a, count in zip(attentions, kept, strict=True)]
    return _layer_by_layer(net, attentions, gone, examples, best_subset)


def equal_shares(attentions: Sequence[Attention], heads: int) -> list[int]:
    """Return the heads of each layer: the same share, ``heads`` in all; some are rounded up."""
    total = sum(a.query_heads for a in attentions)
    exact = [heads * a.query_heads / total for a in attentions]
    counts = [int(share) for share in exact]
    by_loss = sorted(range(len(counts)), key=lambda layer: counts[layer] - exact[layer])
    for layer in by_loss[: heads - sum(counts)]:
        counts[layer] += 1
    return counts


def _layer_by_layer(
    net: PreTrainedModel,
    attentions: Sequence[Attention],
    gone: Sequence[int],
    examples: Sequences,
    choose: Choose,
) -> tuple[Gates, AbstractContextManager[Any]]:
    """Chooses heads and refits W_O on what the layers that were cut before make of the text.

    To what the layer's own W_O makes of that. The damping, 1 % of the mean diagonal, is our choice.
    """
    batch, restoring = examples.whole(), ExitStack()
    gates = {a.path: torch.ones(a.query_heads) for a in attentions}
    counts = {a.path: count for a, count in zip(attentions, gone, strict=True)}

    def enter(attention: Attention, x: Tensor) -> Tensor:
        gate, count = gates[attention.path], counts[attention.path]
        if not count:
            return x
        heads, bias = read_output(attention)
        restoring.callback(write_output, attention, heads.clone(), bias)
        weight = heads.transpose(0, 1).flatten(1).double()
        rows = real_tokens(x, token_mask(batch, attention.kind))
        gram = outer_sum(rows, rows).double()
        gram.diagonal().add_(0.01 * gram.diagonal().mean())
        inverse = torch.linalg.inv(gram)

        def of(some: Sequence[int]) -> Tensor:
            return torch.tensor([c for head in some for c in columns((head,), heads.shape[-1])])

        def loss(some: Sequence[int]) -> float:
            """What a layer misses without some heads, the others refitted (OBS, of a block)."""
            own = of(some)
            needs = torch.linalg.inv(inverse[own[:, None], own])
            return float((needs * (weight[:, own].T @ weight[:, own])).sum())

        gate[list(choose(loss, len(gate), count))] = 0.0
        kept = of(gate.nonzero().flatten().tolist())
        new = torch.zeros_like(weight)
        cross = weight @ gram[:, kept]
        new[:, kept] = torch.linalg.solve(gram[kept[:, None], kept], cross.T).T
        shaped = new.unflatten(1, (len(gate), -1)).transpose(0, 1)
        write_output(attention, shaped.to(heads.dtype), bias)
        left: Tensor = x.unflatten(-1, (len(gate), -1)) * gate[:, None]
        return left.flatten(-2)

    in_sequence(net, attentions, batch, enter)
    return [gates[a.path] for a in attentions], restoring


def dropped_layers(
    net: PreTrainedModel, attentions: Sequence[Attention], share: float, examples: Sequences
) -> tuple[Gates, AbstractContextManager[Any]]:
    """He et al.: whole layers of attention go, those after which the stream is most as before.

    Where the share is of no whole number of layers, fewer go. For decoders whose layers take the
    stream as their first argument and add attention to it.
    """
    streams: dict[int, Tensor] = {}
    found: list[list[Tensor]] = [[] for _ in attentions]

    def entered(layer: int, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        streams[layer] = args[0]

    def left(layer: int, module: nn.Module, args: object, given: Any) -> None:
        x, added = streams.pop(layer), given[0] if isinstance(given, tuple) else given
        found[layer].append(torch.cosine_similarity(x, x + added, -1).mean())

    hooks = _Handles([])
    for i, path in enumerate(a.path for a in attentions):
        layer = net.get_submodule(path.rpartition(".")[0])
        hooks.handles.append(layer.register_forward_pre_hook(partial(entered, i)))
        hooks.handles.append(net.get_submodule(path).register_forward_hook(partial(left, i)))
    with hooks, torch.no_grad():
        for batch in examples.batches():
            run_model(net, batch)
    alike = [float(torch.stack(each).mean()) for each in found]
    order = sorted(range(len(alike)), key=alike.__getitem__, reverse=True)
    gone = {*order[: int((1 - share) * len(attentions))]}
    gates = [torch.full((a.query_heads,), float(i not in gone)) for i, a in enumerate(attentions)]
    return gates, nullcontext()


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
    "Wanda-sp": Rival("wanda", "arXiv 2306.11695"),
    "Kwon et al.": Rival(
        "fisher", "arXiv 2204.09656, without its rearrangement", compensate=tuned_masks
    ),
}


def by_scores(
    name: str, net: PreTrainedModel, share: float, even: bool, examples: Sequences
) -> tuple[Gates, AbstractContextManager[Any]]:
    """A rival of ``RIVALS``: its scores, a share of heads in all layers or of each, its remedy."""
    rival, attentions = RIVALS[name], attention_of(net)
    heads = [a.query_heads for a in attentions]
    evidence: Sequence[Statistics] = ()
    if rival.criterion == "taylor":
        values = torch.cat(taylor(net, attentions, examples))
    else:
        config = ScoreConfig(criterion=(rival.criterion,), unit=Unit.HEAD)
        evidence = gather(net, attentions, config, examples)
        values = scores_of(rival.criterion, evidence, attentions, Unit.HEAD)
    if rival.normalised:
        values = torch.cat([part / part.norm() for part in values.split(heads)])
    count = round(share * sum(heads))
    if even:
        shares = zip(values.split(heads), equal_shares(attentions, count), strict=True)
        gates = [_opened(part, left) for part, left in shares]
    else:
        gates = list(_opened(values, count).split(heads))
    if rival.compensate is None:
        return gates, nullcontext()
    return rival.compensate(net, attentions, gates, examples, evidence)


def _opened(scores: Tensor, count: int) -> Tensor:
    """Return a gate for every score: 1 for the ``count`` best, 0 for the others."""
    gate = torch.zeros(len(scores))
    gate[keep_best(scores.tolist(), [1] * len(scores), count)] = 1.0
    return gate


# method -> from model, modules, share of heads that stay and text to gates, and a context in which
# the model runs with its compensation
CUTTERS = {
    "SlimGPT": slimgpt,  # arXiv 2412.18110, heads alone
    "OSSCAR": osscar,  # arXiv 2403.12983, heads alone
    "LLM-Drop": dropped_layers,  # arXiv 2406.15786
}
