"""A query looks at the token after the earlier copy of its own: prefix matching.

    mean over the second of two equal runs of n random tokens of A[q, q - n + 1]

The control is the same where the second run is another: a head that looks n - 1 places back
whatever stands there has no role.
"""

from __future__ import annotations

from headprune.role.spec import Attended, Counted, Role


def _measure(seen: Attended) -> Counted:
    return seen.second_run(1 - seen.period)


induction = Role(
    _measure,
    line=0.4,
    sign="I",
    definition="attention to the token after the earlier copy of the query's token",
    source="Olsson et al. 2022, arXiv 2209.11895, on prefix matching; the line is ours",
    on="repeated",
    control="unrepeated",
    cost="one diagonal, on each of two inputs of random tokens",
)
