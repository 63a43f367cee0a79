"""A word looks at the one that it depends on, or that depends on it.

    share of words whose hardest word is the related one, per relation and direction, less the
    share of the same words for which the most frequent offset of that relation is right

Attention to a word is that to all of its tokens, attention from it the mean of theirs; its own and
that to special tokens are left out. Relations of fewer than a hundred words, punctuation and the
root are left out, and of causal attention all words that come after the query. It needs
``--trees``, and a fast tokenizer, which says where tokens stand.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

from headprune.role.spec import Attended, Counted, Parsed, Role

RELATIONS = (
    *("acl", "advcl", "advmod", "amod", "appos", "aux", "case", "cc", "ccomp", "clf", "compound"),
    *("conj", "cop", "csubj", "dep", "det", "discourse", "dislocated", "expl", "fixed", "flat"),
    *("goeswith", "iobj", "list", "mark", "nmod", "nsubj", "nummod", "obj", "obl", "orphan"),
    *("parataxis", "reparandum", "vocative", "xcomp"),
)
VARIANTS = (*(f"{name}-head" for name in RELATIONS), *(f"head-{name}" for name in RELATIONS))


def _measure(seen: Attended) -> Counted:
    if seen.parsed is None:
        nothing = seen.weights.new_zeros(*seen.weights.shape[:2], len(VARIANTS)).float()
        return nothing, nothing[:, 0]
    queries, targets, kinds = _pairs(seen.parsed, seen.causal)
    belongs = seen.parsed.belongs.float()
    of_word = belongs / belongs.sum(1, keepdim=True).clamp(min=1)
    to_words = seen.weights.float() @ belongs[:, None]
    words = torch.einsum("sqv,shqw->shvw", of_word, to_words)
    words.diagonal(dim1=-2, dim2=-1).fill_(-1)
    hardest = words.argmax(-1)
    right = hardest.gather(-1, queries[:, None].expand(-1, hardest.shape[1], -1))
    hits = (right == targets[:, None]).float()
    return torch.einsum("shp,spv->shv", hits, kinds), kinds.sum(1)


def _pairs(parsed: Parsed, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """From which word, to which, and as what variant; of both directions."""
    own = torch.arange(parsed.heads.shape[1], device=parsed.heads.device)
    own = own.expand_as(parsed.heads)
    heads = parsed.heads.clamp(min=0)
    queries, targets = torch.cat([own, heads], 1), torch.cat([heads, own], 1)
    kinds = torch.cat([parsed.relations, parsed.relations + len(RELATIONS)], 1)
    there = torch.cat([parsed.heads >= 0] * 2, 1)
    if causal:
        there &= targets < queries
    known = torch.cat([parsed.relations >= 0] * 2, 1) & there
    return queries, targets, F.one_hot(kinds.clamp(min=0), len(VARIANTS)) * known[..., None].float()


def offset_baseline(parts: Sequence[Parsed], causal: bool) -> Counted:
    """For every variant, how often its most frequent offset is right, as of one head.

    Args:
        parts: The sentences, batch by batch.
        causal: Whether words see only those before them.
    """
    pairs = [_pairs(part, causal) for part in parts]
    offsets = torch.cat([(targets - queries).flatten() for queries, targets, _ in pairs])
    kinds = torch.cat([kinds.flatten(0, 1) for _, _, kinds in pairs])
    lowest = int(offsets.min())
    # by variant and offset, how many pairs
    table = torch.zeros(len(VARIANTS), int(offsets.max()) - lowest + 1)
    table.index_add_(1, offsets - lowest, kinds.T)
    best: Int[Tensor, " variants"] = table.argmax(1) + lowest
    sums = [
        (((targets - queries)[..., None] == best) * kinds).sum(1)
        for queries, targets, kinds in pairs
    ]
    counts = torch.cat([kinds.sum(1) for _, _, kinds in pairs]).double()
    return torch.cat(sums)[:, None].double(), counts


syntactic = Role(
    _measure,
    line=0.1,
    sign="X",
    definition="share of words whose hardest word is the one related to them",
    source="Voita et al. 2019, arXiv 1905.09418, section 5.2, in points; Clark et al. 2019, arXiv "
    "1906.04341, section 4.2",
    on="trees",
    control="offset",
    cost="two products that sum tokens to words",
    beyond=True,
    fewest=100,
    variants=VARIANTS,
)
