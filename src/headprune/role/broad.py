"""A query spreads its attention over nearly all that it sees.

    mean over queries of H(A[q, :]) / log(keys in view), where there are at least eight

Heads that learned nothing are broad as well, so this is an attribute: it says that a head chooses
little, and not that it does something.
"""

from __future__ import annotations

import torch

from headprune.role.spec import Attended, Counted, Role, counted

_FEWEST = 8  # keys: over fewer everything is broad


def _measure(seen: Attended) -> Counted:
    view = seen.seen().sum(-1)
    valid = view >= _FEWEST
    most = view.clamp(min=2).log()
    heads = []
    for head in seen.weights.unbind(1):  # of all at once it would be a second tensor as large
        share = torch.special.entr(head.float()).sum(-1) / most
        heads.append((share * valid).sum(-1))
    return counted(torch.stack(heads, 1), valid.sum(-1))


broad = Role(
    _measure,
    line=0.78,
    sign="b",
    definition="entropy of the attention, as a share of the largest possible",
    source="Clark et al. 2019, arXiv 1906.04341, section 3.3: 3.8 nats of 4.85 at 128 tokens",
    on="text",
    control=None,
    cost="one entropy, head by head",
    attribute=True,
    crosses=True,
)
