"""A query looks at its own place.

The score is the mean over queries of A[q, q].
"""

from __future__ import annotations

from headprune.role.spec import Attended, Counted, Role


def _measure(seen: Attended) -> Counted:
    return seen.at_offset(0, seen.after(1))  # the first of causal attention sees nothing else


self_token = Role(
    _measure,
    line=0.5,
    sign="S",
    definition="attention to the query's own place",
    source="Clark et al. 2019, arXiv 1906.04341, section 3.1, with the line of its neighbours",
    on="text",
    control="uniform",
    cost="one diagonal",
)
