"""A query looks at the token after it, whatever that is; only where attention is not causal.

The score is the mean over queries of A[q, q + 1] on random tokens, of which nothing but the place
tells where to look.
"""

from __future__ import annotations

from headprune.role.spec import Attended, Counted, Role


def _measure(seen: Attended) -> Counted:
    return seen.at_offset(1)


next_token = Role(
    _measure,
    line=0.5,
    sign="N",
    definition="attention to the token after",
    source="Clark et al. 2019, arXiv 1906.04341, section 3.1; the line is that of their code",
    on="repeated",
    control="uniform",
    cost="one diagonal",
)
