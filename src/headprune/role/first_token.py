"""A query rests on the first token: an attention sink.

    mean over queries from the fifth on of A[q, 0]

Many heads do so where what they look for is missing, an induction head among them, so this is an
attribute and never the role.
"""

from __future__ import annotations

import torch

from headprune.role.spec import Attended, Counted, Role, counted


def _measure(seen: Attended) -> Counted:
    first = seen.first_key()
    mass = seen.weights[torch.arange(len(first)), :, :, first].float()
    valid = seen.after(4)
    return counted((mass * valid[:, None]).sum(-1), valid.sum(-1))


first_token = Role(
    _measure,
    line=0.5,
    sign="f",
    definition="attention to the first token",
    source="Xiao et al. 2023, arXiv 2309.17453, section 3.1; they draw no line",
    on="text",
    control="uniform",
    cost="one column",
    attribute=True,
    crosses=True,
)
