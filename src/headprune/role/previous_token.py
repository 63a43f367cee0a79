"""A query looks at the token before it, whatever that is.

The score is the mean over queries of A[q, q - 1] on random tokens, of which nothing but the place
tells where to look. On text the same heads score lower, where they find something better.
"""

from __future__ import annotations

from headprune.role.spec import Attended, Counted, Role


def _measure(seen: Attended) -> Counted:
    return seen.at_offset(-1)


previous_token = Role(
    _measure,
    line=0.5,
    sign="P",
    definition="attention to the token before",
    source="Clark et al. 2019, arXiv 1906.04341, section 3.1; the line is that of their code",
    on="repeated",
    control="uniform",
    cost="one diagonal",
)
