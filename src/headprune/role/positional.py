"""A query looks hardest at the key a fixed number of places away, up to eight on either side.

The score is the share of queries with argmax A[q, :] = q + d, for the best offset d, among those
that have such a key.
"""

from __future__ import annotations

import torch

from headprune.role.spec import Attended, Counted, Role

OFFSETS = tuple(d for d in range(-8, 9) if d)


def _measure(seen: Attended) -> Counted:
    hardest = seen.weights.argmax(-1)
    places = torch.arange(hardest.shape[-1], device=hardest.device)
    keys = torch.nn.functional.pad(seen.keys, (8, 8 + max(0, len(places) - seen.keys.shape[-1])))
    sums, counts = [], []
    for offset in OFFSETS:
        # of a causal model none is after the query
        has = seen.queries & keys[:, places + offset + 8] & (offset < 0 or not seen.causal)
        sums.append(((hardest == places + offset) & has[:, None]).sum(-1))
        counts.append(has.sum(-1))
    return torch.stack(sums, -1).float(), torch.stack(counts, -1).float()


positional = Role(
    _measure,
    line=0.9,
    sign="O",
    definition="share of queries whose largest weight is at one fixed offset",
    source="Voita et al. 2019, arXiv 1905.09418, section 5.1",
    on="text",
    control="uniform",
    cost="one search for the largest weight",
    crosses=True,
    variants=tuple(f"{d:+d}" for d in OFFSETS),
)
