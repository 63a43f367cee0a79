"""A query looks at the earlier copy of its own token.

    mean over the second of two equal runs of n random tokens of A[q, q - n]

The control is the same where the second run is another: a head that looks n places back whatever
stands there has no role.
"""

from __future__ import annotations

from headprune.role.spec import Attended, Counted, Role


def _measure(seen: Attended) -> Counted:
    return seen.second_run(-seen.period)


duplicate_token = Role(
    _measure,
    line=0.4,
    sign="=",
    definition="attention to the earlier copy of the query's token",
    source="Wang et al. 2022, arXiv 2211.00593, section 3; the line is ours",
    on="repeated",
    control="unrepeated",
    cost="one diagonal, on each of two inputs of random tokens",
)
