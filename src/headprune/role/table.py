"""The roles of heads, a decorated function each.

    score = sum over queries / number of queries

A head has a role where its interval is above the threshold and its control below it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

from headprune.errors import PlanError
from headprune.registry import Registry
from headprune.role.attended import Attended, Counted, Facts, counted

Input = Literal["text", "repeated", "trees", "needles"]
"""Text, runs of random tokens twice, parsed sentences, or contexts with a fact."""

Control = Literal["uniform", "unrepeated", "offset", "elsewhere"]
"""Uniform attention, another second run, the most frequent offset, or the fact at another depth."""

Measure = Callable[[Attended], Counted | None]


@dataclass(frozen=True)
class Role:
    """A role of heads.

    Attributes:
        measure: Sums and counts on one batch; None where the module has no score.
        sign: Letter in the table of heads.
        threshold: Lowest score of a head with the role.
        on: Input of the measure.
        control: None where idle heads may have the role.
        attribute: Given beside a role, never as the role.
        crosses: Whether cross-attention can have it.
        beyond: The threshold is on the score less its control.
        fewest: Queries that a variant needs.
        variants: Offsets, kinds or relations with a score each; the best counts.
    """

    measure: Measure
    sign: str
    threshold: float
    on: Input = "text"
    control: Control | None = "uniform"
    attribute: bool = False
    crosses: bool = False
    beyond: bool = False
    fewest: int = 1
    variants: tuple[str, ...] = ("",)

    @property
    def reference(self) -> str:
        return inspect.cleandoc(self.measure.__doc__ or "")

    @property
    def definition(self) -> str:
        """The first line of the reference."""
        first = self.reference.partition("\n")[0].rstrip(".")
        return first[0].lower() + first[1:]

    @property
    def source(self) -> str:
        """Paper and place of definition and threshold."""
        return " ".join(self.reference.partition("\nSource: ")[2].split()).rstrip(".")


ROLES: Registry[Role] = Registry("role", PlanError)


def role(name: str, sign: str, threshold: float, **fields: Any) -> Callable[[Measure], Measure]:
    """Register the decorated function as a role."""

    def register(measure: Measure) -> Measure:
        ROLES.add(name, Role(measure, sign, threshold, **fields))
        return measure

    return register


OFFSETS = tuple(f"{d:+d}" for d in range(-8, 9) if d)
KINDS = ("beginning", "end", ".", ",")
RELATIONS = (
    *("acl", "advcl", "advmod", "amod", "appos", "aux", "case", "cc", "ccomp", "clf", "compound"),
    *("conj", "cop", "csubj", "dep", "det", "discourse", "dislocated", "expl", "fixed", "flat"),
    *("goeswith", "iobj", "list", "mark", "nmod", "nsubj", "nummod", "obj", "obl", "orphan"),
    *("parataxis", "reparandum", "vocative", "xcomp"),
)
DIRECTED = (*(f"{name}-head" for name in RELATIONS), *(f"head-{name}" for name in RELATIONS))
FEW_KEYS = 8  # with fewer in view, everything is broad and any token is rare
FREQUENT = 500  # kinds of tokens that are not rare


@role("previous-token", "P", 0.5, on="repeated")
def previous_token(attn: Attended) -> Counted:
    """Attention to the token before.

        mean over queries of A[q, q - 1]

    Measured on random tokens, where nothing but the place says where to look. On text the same
    heads score lower, where they find something better.

    Source: Clark et al. 2019, arXiv 1906.04341, section 3.1; the threshold is that of their code.
    """
    return attn.at_offset(-1)


@role("next-token", "N", 0.5, on="repeated")
def next_token(attn: Attended) -> Counted:
    """Attention to the token after, where attention is not causal.

        mean over queries of A[q, q + 1]

    Measured on random tokens, as previous-token is.

    Source: Clark et al. 2019, arXiv 1906.04341, section 3.1; the threshold is that of their code.
    """
    return attn.at_offset(1)


@role("self-token", "S", 0.5)
def self_token(attn: Attended) -> Counted:
    """Attention to the query's own place.

        mean over queries of A[q, q]

    Source: Clark et al. 2019, arXiv 1906.04341, section 3.1, with the threshold of its neighbours.
    """
    return attn.at_offset(0, attn.queries_after(1))  # the first sees only itself if causal


@role("positional", "O", 0.9, crosses=True, variants=OFFSETS)
def positional(attn: Attended) -> Counted:
    """Share of queries whose largest weight is at one fixed offset.

        share of queries with argmax A[q, :] = q + d, for the best offset d

    Offsets go up to eight on either side; queries without a key there do not count.

    Source: Voita et al. 2019, arXiv 1905.09418, section 5.1.
    """
    largest = attn.weights.argmax(-1)
    places = torch.arange(largest.shape[-1], device=largest.device)
    keys = F.pad(attn.keys, (8, 8 + max(0, len(places) - attn.keys.shape[-1])))
    sums, counts = [], []
    for offset in map(int, OFFSETS):
        has = attn.queries & keys[:, places + offset + 8] & (offset < 0 or not attn.causal)
        sums.append(((largest == places + offset) & has[:, None]).sum(-1))
        counts.append(has.sum(-1))
    return torch.stack(sums, -1).float(), torch.stack(counts, -1).float()


@role("delimiter", "D", 0.6, crosses=True, variants=KINDS)
def delimiter(attn: Attended) -> Counted:
    """Attention to special tokens, full stops or commas, each kind for itself.

        mean over queries of the sum of A[q, k] over the keys of one kind

    The first token of causal attention is left out: it is the attribute first-token.

    Source: Clark et al. 2019, arXiv 1906.04341, section 3.2; the threshold is that of their code.
    """
    kinds = torch.stack([torch.isin(attn.key_ids, attn.classes[kind]) for kind in KINDS], -1)
    kinds &= attn.keys[..., None]
    if attn.causal:
        kinds[torch.arange(len(kinds)), attn.first_key()] = False
    mass = attn.weights.float() @ kinds.float()[:, None]
    has = attn.in_view().float() @ kinds.float() > 0
    return (mass * has[:, None]).sum(-2), has.sum(-2).float()


@role("duplicate-token", "=", 0.4, on="repeated", control="unrepeated")
def duplicate_token(attn: Attended) -> Counted:
    """Attention to the earlier copy of the query's token.

        mean over the second of two equal runs of n random tokens of A[q, q - n]

    The control has another second run: a head that always looks n places back has no role.

    Source: Wang et al. 2022, arXiv 2211.00593, section 3; the threshold is ours.
    """
    return attn.in_second_run(-attn.period)


@role("induction", "I", 0.4, on="repeated", control="unrepeated")
def induction(attn: Attended) -> Counted:
    """Attention to the token after the earlier copy of the query's token.

        mean over the second of two equal runs of n random tokens of A[q, q - n + 1]

    The control has another second run: a head that always looks n - 1 places back has no role.

    Source: Olsson et al. 2022, arXiv 2209.11895, on prefix matching; the threshold is ours.
    """
    return attn.in_second_run(1 - attn.period)


@role("retrieval", "T", 0.1, on="needles", control="elsewhere")
def retrieval(attn: Attended) -> Counted:
    """Share of copied tokens whose original in a needle has the largest weight.

        share of the tokens of a number with argmax A[q, :] in the needle, at the token written

    The needle is a sentence with a number, hidden in text as ``evaluate --needle`` does. Only
    contexts whose whole number the model writes count. The control has the needle at another depth:
    a head that always looks as far back has no role. It needs ``needle_lengths``.

    Source: Wu et al. 2024, arXiv 2404.15574, section 2; the threshold is theirs.
    """
    largest, copied = attn.weights.argmax(-1), attn.facts["copied"]
    looked_at = attn.facts["needle"][:, None].expand(-1, largest.shape[1], -1).gather(-1, largest)
    written = attn.key_ids.roll(-1, 1)  # a query predicts the token after it
    hits = (looked_at == written[:, None]) & copied[:, None]
    return counted(hits.sum(-1).float(), copied.sum(-1))


@role(
    "syntactic", "X", 0.1, on="trees", control="offset", beyond=True, fewest=100, variants=DIRECTED
)
def syntactic(attn: Attended) -> Counted:
    """Share of words whose largest weight is on a word related to them.

        (words whose argmax is the related word) - (words where the usual offset is right),
        as a share of the words, per relation and direction

    Attention to a word is the sum over its tokens, attention from it the mean. Left out are the
    word itself, special tokens, punctuation and the root. Also left out are relations of fewer than
    a hundred words, and in causal attention words after the query. It needs ``--trees`` and a fast
    tokenizer.

    Source: Voita et al. 2019, arXiv 1905.09418, section 5.2, in points; Clark et al. 2019, arXiv
    1906.04341, section 4.2.
    """
    queries, targets, kinds = _pairs(attn.facts, attn.causal)
    belongs = attn.facts["belongs"].float()
    of_word = belongs / belongs.sum(1, keepdim=True).clamp(min=1)
    words = torch.einsum("sqv,shqw->shvw", of_word, attn.weights.float() @ belongs[:, None])
    words.diagonal(dim1=-2, dim2=-1).fill_(-1)
    largest = words.argmax(-1)
    looked_at = largest.gather(-1, queries[:, None].expand(-1, largest.shape[1], -1))
    hits = (looked_at == targets[:, None]).float()
    return torch.einsum("shp,spv->shv", hits, kinds), kinds.sum(1)


def _pairs(facts: Facts, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return looking words, related words and one-hot variants, in both directions."""
    known = facts["heads"] >= 0
    heads = facts["heads"].clamp(min=0)
    words = torch.arange(heads.shape[1], device=heads.device).expand_as(heads)
    queries, targets = torch.cat([words, heads], 1), torch.cat([heads, words], 1)
    relations = facts["relations"]
    kinds = torch.cat([relations, relations + len(RELATIONS)], 1)
    counts = torch.cat([known & (relations >= 0)] * 2, 1)
    if causal:
        counts &= targets < queries
    return (
        queries,
        targets,
        F.one_hot(kinds.clamp(min=0), len(DIRECTED)) * counts[..., None].float(),
    )


def offset_control(batches: Sequence[Facts], causal: bool) -> Counted:
    """Return the hits of each relation's most frequent offset, as of one head."""
    pairs = [_pairs(facts, causal) for facts in batches]
    offsets = torch.cat([(targets - queries).flatten() for queries, targets, _ in pairs])
    kinds = torch.cat([kinds.flatten(0, 1) for _, _, kinds in pairs])
    lowest = int(offsets.min())
    table = torch.zeros(len(DIRECTED), int(offsets.max()) - lowest + 1)
    table.index_add_(1, offsets - lowest, kinds.T)
    best: Int[Tensor, " variants"] = table.argmax(1) + lowest
    sums = [
        (((targets - queries)[..., None] == best) * kinds).sum(1)
        for queries, targets, kinds in pairs
    ]
    counts = torch.cat([kinds.sum(1) for _, _, kinds in pairs])
    return torch.cat(sums)[:, None].double(), counts.double()


@role("rare-token", "R", 0.5, on="trees", variants=("rarest", "one of two"))
def rare_token(attn: Attended) -> Counted:
    """Share of queries whose largest weight is at the rarest token of their sentence.

        share of queries with argmax A[q, :] at the rarest token in view, or one of the two rarest

    Frequencies are those of the file of trees. Queries that see fewer than eight tokens, or only
    the 500 most frequent ones, do not count; special tokens are left out. It needs ``--trees``.

    Source: Voita et al. 2019, arXiv 1905.09418, section 5.3; the paper has no threshold, and
    over half for one of two.
    """
    ranks, heads = attn.facts["ranks"], attn.weights.shape[1]
    known = ranks >= 0
    view = attn.in_view() & known[:, None]
    ranks_in_view = ranks[:, None].expand_as(view).masked_fill(~view, -1)
    two = ranks_in_view.topk(min(2, view.shape[-1]), -1).values
    counts = known & (view.sum(-1) >= FEW_KEYS) & (two[..., 0] >= FREQUENT)
    largest = attn.weights.masked_fill(~known[:, None, None], -1).argmax(-1)
    rank = ranks[:, None].expand(-1, heads, -1).gather(-1, largest)
    hits = [((rank >= two[:, None, :, place]) & counts[:, None]).sum(-1) for place in (0, -1)]
    return torch.stack(hits, -1).float(), counts.sum(-1, keepdim=True).expand(-1, 2).float()


@role("broad", "b", 0.78, control=None, attribute=True, crosses=True)
def broad(attn: Attended) -> Counted:
    """Entropy of the attention, as a share of the largest possible.

        mean over queries with at least eight keys in view of H(A[q, :]) / log(keys in view)

    Heads that learned nothing are broad as well, so it is an attribute: the head chooses little.

    Source: Clark et al. 2019, arXiv 1906.04341, section 3.3: 3.8 nats of 4.85 at 128 tokens.
    """
    view = attn.in_view().sum(-1)
    valid, most = view >= FEW_KEYS, view.clamp(min=2).log()
    heads = []
    for head in attn.weights.unbind(1):  # of all at once it would be a second tensor as large
        heads.append((torch.special.entr(head.float()).sum(-1) / most * valid).sum(-1))
    return counted(torch.stack(heads, 1), valid.sum(-1))


@role("first-token", "f", 0.5, attribute=True, crosses=True)
def first_token(attn: Attended) -> Counted:
    """Attention to the first token, an attention sink.

        mean over queries from the fifth on of A[q, 0]

    Many heads rest there where their target is missing, induction heads among them, so it is
    an attribute.

    Source: Xiao et al. 2023, arXiv 2309.17453, section 3.1; they draw no threshold.
    """
    first = attn.first_key()
    mass = attn.weights[torch.arange(len(first)), :, :, first].float()
    valid = attn.queries_after(4)
    return counted((mass * valid[:, None]).sum(-1), valid.sum(-1))


ROLES.freeze()
