"""A token looks at the rarest of its sentence, or at one of the two rarest.

    share of queries whose argmax of A[q, :] is the rarest token that q sees, or one of the two

Frequencies are those of the file of trees. Queries that see fewer than eight tokens, or none but
the 500 most frequent ones, do not count; special tokens are left out. It needs ``--trees``, whose
sentences are looked at one by one.
"""

from __future__ import annotations

import torch

from headprune.role.spec import Attended, Counted, Role

VARIANTS = ("rarest", "one of two")
_FEWEST, _FREQUENT = 8, 500


def _measure(seen: Attended) -> Counted:
    sequences, heads, length = seen.weights.shape[:3]
    if seen.parsed is None:
        nothing = seen.weights.new_zeros(sequences, heads, len(VARIANTS)).float()
        return nothing, nothing[:, 0]
    ranks = seen.parsed.ranks
    known = ranks >= 0
    view = seen.seen() & known[:, None]
    seen_ranks = ranks[:, None].expand(-1, length, -1).masked_fill(~view, -1)
    two = seen_ranks.topk(min(2, seen_ranks.shape[-1]), -1).values
    counts = known & (view.sum(-1) >= _FEWEST) & (two[..., 0] >= _FREQUENT)
    hardest = seen.weights.masked_fill(~known[:, None, None], -1).argmax(-1)
    at = ranks[:, None].expand(-1, heads, -1).gather(-1, hardest)
    hits = [((at >= two[:, None, :, place]) & counts[:, None]).sum(-1) for place in (0, -1)]
    queries = counts.sum(-1).float()
    return torch.stack(hits, -1).float(), torch.stack([queries, queries], -1)


rare_token = Role(
    _measure,
    line=0.5,
    sign="R",
    definition="share of queries whose largest weight is at the rarest token of their sentence",
    source="Voita et al. 2019, arXiv 1905.09418, section 5.3; the paper has no line, and over half "
    "for one of two",
    on="trees",
    control="uniform",
    cost="one search for the largest weight",
    variants=VARIANTS,
)
