"""Compensation: W_O refitted by least squares, layer after layer, for the removed heads.

In one pass of two streams (see ``model.streams``), every W_O is fitted on the inputs that the cut
and refitted layers before it produce. The goal is half the original's output at its place, and half
the uncut layer's output on these inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from headprune.context import Progress
from headprune.errors import DataError, PlanError
from headprune.model.batch import Batch, doubled, inputs_of, real_tokens, token_mask
from headprune.model.heads import project_output, read_output, write_output
from headprune.model.passes import OneStream, RunsTwice, Stream, in_sequence
from headprune.runtime.modeling_headprune import Attention
from headprune.tensors.least_squares import Moments, fit_held_out, held_out

# Of the goal of a fit, the share that the uncut layer makes of what enters it in the cut model; the
# rest, the output in the original, has later layers mend the loss of earlier ones, but only on the
# kind of text of the fit. docs/experiments.md gives the worth of each.
OWN_SHARE = 0.5
_TOKENS = 4096  # at once in the moments: this bounds the copies of their states
RIDGES = (math.inf, 3e-1, 1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 1e-4, 1e-5)


@dataclass(frozen=True)
class ModuleRefit:
    """The effect of a refit on one module.

    Attributes:
        before: Squared error of the outputs on all tokens without the refit, relative to the goal.
        after: The same with it; never above ``before``.
    """

    before: float
    after: float


@dataclass(frozen=True)
class FittedOutput:
    """W_O of a module, fitted.

    Attributes:
        heads: Its columns, head by head, those of closed heads as they were.
        bias: Its bias, if it has one.
        record: Its effect.
    """

    heads: Float[Tensor, "heads hidden head_dim"]
    bias: Float[Tensor, " hidden"] | None
    record: ModuleRefit


def refit(
    model: PreTrainedModel,
    attentions: Sequence[Attention],
    gates: Sequence[Float[Tensor, " _heads"]],
    batch: Batch,
    on_module: Progress = lambda done, total: None,
) -> list[ModuleRefit]:
    """Refit every W_O in place, so that the model with closed gates does as with all heads.

    Args:
        model: The model, uncut; its output projections change.
        attentions: The attention modules, all of them.
        gates: Per module, the gate values it will be cut with; 0 for heads that go.
        batch: Calibration text: every sequence at once, padding marked by ``attention_mask``.
        on_module: Called with modules done and modules in all.

    Returns:
        One record per module that has a head left.

    Raises:
        DataError: If there is too little text, or the statistics are not finite.
        PlanError: If a module runs more than once.
    """
    count = len(inputs_of(batch))
    if count < 2:
        raise DataError(
            "--refit needs two sequences of text at least: give more, or a smaller --seq-len."
        )
    gate_of = {a.path: gate for a, gate in zip(attentions, gates, strict=True)}
    records: list[ModuleRefit] = []
    seen = 0

    def enter(attention: Attention, x: Tensor) -> OneStream:
        nonlocal seen
        gate, original = gate_of[attention.path].to(x), Stream.ORIGINAL.of(x)
        changed = Stream.CHANGED.of(x)
        # W_O is linear: its output of a mean is the mean of its outputs
        goal = project_output(attention, torch.lerp(original, changed, OWN_SHARE))
        heads = changed.unflatten(-1, (len(gate), -1))
        mine = heads.mul_(gate[:, None]).flatten(-2)
        fitted = None
        # as long as all layers before are whole there is nothing to make up for
        if bool((gate != 0).any()) and not torch.equal(mine, original):
            fitted = fit_output(attention, gate, mine, goal, batch)
        del goal  # so that no more states are there at once than the streams need
        known = project_output(attention, original)
        if fitted is not None:
            write_output(attention, fitted.heads, fitted.bias)
            records.append(fitted.record)
        seen += 1
        on_module(seen, len(attentions))
        return OneStream(Stream.CHANGED, mine.clone(), known)  # of a view, x would stay as well

    try:
        in_sequence(model, attentions, doubled(batch), enter)
    except RunsTwice as error:
        raise PlanError(f"{error} Cut without --refit, and train gates instead.") from None
    return records


def refuse_singular(attention: Attention, tokens: int, columns: int, instead: str) -> None:
    """Fewer tokens than columns leave x x^T singular, and the fit to chance.

    Raises:
        DataError: If that is so.
    """
    if tokens < columns:
        raise DataError(
            f"The Gram matrix of what enters the output projection of '{attention.path}' is "
            f"singular: {columns} columns, and the text has {tokens} tokens. Give more text (see "
            f"--calibration-tokens), or {instead}."
        )


def fit_output(
    attention: Attention,
    gate: Float[Tensor, " heads"],
    mine: Float[Tensor, "sequences length width"],
    wanted: Float[Tensor, "sequences length hidden"],
    batch: Batch,
) -> FittedOutput:
    """Fit the W_O of one module.

    Args:
        attention: The module; it stays as it is.
        gate: 0 for closed heads.
        mine: Outputs of its heads, times their gates where these are other than 0 and 1.
        wanted: The wanted output of W_O.
        batch: The text.

    Raises:
        DataError: If there is too little text, or the statistics are not finite.
    """
    heads, bias = read_output(attention)
    width = heads.shape[-1]
    kept = torch.repeat_interleave(gate != 0, width).to(mine.device)
    start = heads.transpose(0, 1).flatten(1).double().to(mine.device)
    offset = 0.0 if bias is None else bias.to(mine.device)
    mask = token_mask(batch, attention.kind)

    def moments(rows: Tensor) -> Moments:
        own = None if mask is None else mask[rows]
        x, y = (real_tokens(states[rows], own) for states in (mine, wanted))
        return Moments.of(x[:, kept], y - offset)

    held, at_once = held_out(len(mine)), max(1, _TOKENS // mine.shape[1])
    fitted, judged = (
        reduce(add, (moments(rows) for rows in part.nonzero()[:, 0].split(at_once)))
        for part in (~held, held)
    )
    refuse_singular(
        attention, fitted.tokens + judged.tokens, int(kept.sum()), "cut without a refit"
    )
    try:
        fit = fit_held_out((fitted, judged), start[:, kept], RIDGES, bias is not None)
    except ValueError:
        raise DataError(
            f"What enters the output projection of '{attention.path}' is not finite. Try dtype "
            "float32."
        ) from None
    if not bool(fit.weight.isfinite().all()):
        raise DataError(
            f"The least squares of '{attention.path}' have no finite solution: its weights, or "
            "products with the text are too large. Cut without a refit."
        )
    new = start.clone()
    new[:, kept] = fit.weight
    if bias is not None and fit.shift is not None:
        bias = bias + fit.shift.to(bias)
    power = max(float(fit.moments.output_power.sum()), 1e-30)
    before, after = fit.whole.error(start[:, kept]), fit.moments.error(fit.weight)
    record = ModuleRefit(before / power, after / power)
    return FittedOutput(new.unflatten(1, (len(gate), width)).transpose(0, 1).float(), bias, record)
