"""What a head writes of a token makes that token likelier: copying, by the OV circuit.

    share of tokens t of a run with argmax_u (W_U W_O W_V x_t)[u] = t, over the tokens u of the run

x_t is what the head reads of t; what it writes of all of them alike is taken off. By chance it is
one in as many tokens as the run has. An induction head copies; a head that looks at the right place
and copies nothing is none. This says what a head would write, and not where it looks, so it is an
attribute. Only of models that predict the next token, and whose W_O writes what W_U reads.
"""

from __future__ import annotations

import torch

from headprune.role.spec import Attended, Counted, Role, counted


def _measure(seen: Attended) -> Counted:
    sequences, heads = seen.weights.shape[:2]
    if seen.written is None:
        return counted(seen.weights.new_zeros(sequences, heads).float(), torch.zeros(sequences))
    own = torch.arange(seen.period, device=seen.written.device)
    hits = (seen.written.argmax(-1) == own).sum(-1)
    return counted(hits.float(), torch.full_like(hits[:, 0], seen.period))


copying = Role(
    _measure,
    line=0.5,
    sign="c",
    definition="share of tokens that the head, looking at them, makes likeliest of a run",
    source="Elhage et al. 2021, A Mathematical Framework for Transformer Circuits, and Olsson et "
    "al. 2022, arXiv 2209.11895, on copying; the line is ours",
    on="repeated",
    control=None,
    cost="W_O on the values of one run, and its product with as many rows of W_U",
    attribute=True,
    writing=True,
)
