"""A query looks at tokens that separate: special ones, full stops, commas, each kind for itself.

    mean over queries of the sum of A[q, k] over the keys of one kind

The first token of causal attention is left out: it is the attribute first-token, whatever it is.
"""

from __future__ import annotations

import torch

from headprune.role.spec import Attended, Counted, Role

KINDS = ("beginning", "end", ".", ",")


def _measure(seen: Attended) -> Counted:
    kinds = torch.stack([torch.isin(seen.key_ids, seen.classes[kind]) for kind in KINDS], -1)
    kinds &= seen.keys[..., None]
    if seen.causal:
        kinds[torch.arange(len(kinds)), seen.first_key()] = False
    mass = seen.weights.float() @ kinds.float()[:, None]
    # without such a key in view there is nothing to look at
    has = seen.seen().float() @ kinds.float() > 0
    return (mass * has[:, None]).sum(-2), has.sum(-2).float()


delimiter = Role(
    _measure,
    line=0.6,
    sign="D",
    definition="attention to special tokens, full stops or commas",
    source="Clark et al. 2019, arXiv 1906.04341, section 3.2; the line is that of their code",
    on="text",
    control="uniform",
    cost="one product with four columns",
    crosses=True,
    variants=KINDS,
)
