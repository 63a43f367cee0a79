"""A head copies a fact out of a long context, token by token.

    share of the tokens of a number that the model writes at which the key with the largest weight
    lies in the sentence that tells the number, and is the token that is written

The sentence (the needle) is hidden in text at several depths, as ``evaluate --needle`` does. Only
contexts in which the model writes the whole number count: of the others no head says anything. The
control is the same with the needle where that of another depth lies: a head that always looks as
many places back finds it at one depth, and has no role. It needs ``needle_lengths``.
"""

from __future__ import annotations

from headprune.role.spec import Attended, Counted, Role, counted


def _measure(seen: Attended) -> Counted:
    sequences, heads = seen.weights.shape[:2]
    if seen.hidden is None:
        nothing = seen.weights.new_zeros(sequences, heads).float()
        return counted(nothing, nothing[:, 0])
    hardest = seen.weights.argmax(-1)
    looked_at = seen.hidden.needle[:, None].expand(-1, heads, -1).gather(-1, hardest)
    written = seen.key_ids.roll(-1, 1)  # what stands after a query is what it makes likeliest
    hits = (looked_at == written[:, None]) & seen.hidden.asked[:, None]
    return counted(hits.sum(-1).float(), seen.hidden.asked.sum(-1))


retrieval = Role(
    _measure,
    line=0.1,
    sign="T",
    definition="share of copied tokens of which the largest weight is on the original in a needle",
    source="Wu et al. 2024, arXiv 2404.15574, section 2; the line is theirs",
    on="needles",
    control="elsewhere",
    cost="one search for the largest weight",
)
