"""Compensation: W_O refitted by least squares, layer after layer, for the heads that are gone.

Two streams run side by side as one batch: the first is the original, the second the cut model. At
every output projection the second stream's W_O is fitted to what the first one gives, on the inputs
that the cut and refitted layers before it produce, so that later layers make up for earlier ones.
One pass; of a layer nothing is kept once it is passed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from headprune.errors import DataError, PlanError
from headprune.models.evidence import Batch, real_tokens, run_model, token_mask
from headprune.models.heads import read_output, write_output
from headprune.runtime.modeling_headprune import Attention
from headprune.tensors.least_squares import Moments, best_ridge, held_out, ridge_path

RIDGES = (math.inf, 3e-1, 1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 1e-4, 1e-5)


class RunsTwice(PlanError):
    """A module runs more than once, so that no one place has its statistics."""


OnOutput = Callable[[Attention, Tensor], Tensor]


@dataclass(frozen=True)
class Refit:
    """What a refit did to one module.

    Attributes:
        path: The module.
        ridge: The ridge that the held-out tokens chose; infinity leaves W_O as it is.
        before: Relative squared error of the outputs on all tokens without the refit.
        after: The same with it; never above ``before``.
        held_out: The same on the tokens that chose the ridge, fitted on the others.
    """

    path: str
    ridge: float
    before: float
    after: float
    held_out: float


def in_sequence(
    model: PreTrainedModel, attentions: Sequence[Attention], batch: Batch, on_output: OnOutput
) -> None:
    """One forward pass in which every output projection asks what to give, in the order they run.

    Args:
        model: The model.
        attentions: The modules.
        batch: Inputs of all sequences at once.
        on_output: From a module and what enters its output projection, of shape (sequences,
            length, width), to what leaves it.

    Raises:
        RunsTwice: If a module runs more than once.
    """
    done: set[str] = set()

    def forward(attention: Attention) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            if attention.path in done:
                raise RunsTwice(
                    f"'{attention.path}' runs in more than one layer, so there is no one place to "
                    "take its statistics from."
                )
            done.add(attention.path)
            return on_output(attention, x)

        return run

    present = [attention for attention in attentions if attention.query_heads]
    try:
        for attention in present:
            attention.output_projection.forward = forward(attention)
        with torch.no_grad():
            run_model(model, batch)
    finally:
        for attention in present:
            attention.output_projection.__dict__.pop("forward", None)


def refit(
    model: PreTrainedModel,
    attentions: Sequence[Attention],
    gates: Sequence[Float[Tensor, " heads"]],
    batch: Batch,
    on_module: Callable[[int, int], None] = lambda done, total: None,
) -> list[Refit]:
    """Refits every W_O, in place, so that the model with closed gates does what it did with all.

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
    count = len(batch["input_ids"])
    if count < 2:
        raise DataError(
            "--refit needs two sequences of text at least: give more, or a smaller --seq-len."
        )
    both = {
        name: torch.cat([value, value]) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }
    gate_of = {a.path: gate for a, gate in zip(attentions, gates, strict=True)}
    records: list[Refit] = []
    seen = 0

    def on_output(attention: Attention, x: Tensor) -> Tensor:
        nonlocal seen
        gate = gate_of[attention.path].to(x)
        wanted = project(attention, x[:count])
        mine = (x[count:].unflatten(-1, (len(gate), -1)) * gate[:, None]).flatten(-2)
        # as long as all layers before are whole there is nothing to make up for
        if bool((gate != 0).any()) and not torch.equal(mine, x[:count]):
            records.append(_fitted(attention, gate, mine, wanted, batch))
        seen += 1
        on_module(seen, len(attentions))
        return torch.cat([wanted, project(attention, mine)])

    try:
        in_sequence(model, attentions, both, on_output)
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


def _fitted(
    attention: Attention, gate: Tensor, mine: Tensor, wanted: Tensor, batch: Batch
) -> Refit:
    """Fits the W_O of one module and writes it."""
    heads, bias = read_output(attention)
    width = heads.shape[-1]
    kept = torch.repeat_interleave(gate != 0, width).to(mine.device)
    start = heads.transpose(0, 1).flatten(1).double().to(mine.device)
    offset = 0.0 if bias is None else bias.to(mine.device)
    mask = token_mask(batch, attention.kind)
    both: list[Moments] = []
    held = held_out(len(mine))
    for part in (~held, held):
        own = None if mask is None else mask[part]
        x = real_tokens(mine[part], own)[:, kept]
        both.append(Moments.of(x, real_tokens(wanted[part] - offset, own)))
    fitted, judged = (m.centred() if bias is not None else m for m in both)
    whole = both[0] + both[1]
    refuse_singular(attention, whole.tokens, int(kept.sum()), "cut without a refit")
    target = whole.centred() if bias is not None else whole
    try:
        ridge, error = best_ridge(fitted, judged, start[:, kept], RIDGES)
        (weight,) = ridge_path(target, start[:, kept], [ridge])
    except ValueError:
        raise DataError(
            f"What enters the output projection of '{attention.path}' is not finite. Try --dtype "
            "float32."
        ) from None
    if not bool(weight.isfinite().all()):
        raise DataError(
            f"The least squares of '{attention.path}' have no finite solution: its weights, or "
            "what they make of the text, are too large to multiply. Cut without a refit."
        )
    new = start.clone()
    new[:, kept] = weight
    if bias is not None:
        gap = whole.output_sum - weight @ whole.input_sum
        bias = bias + (gap / max(whole.tokens, 1)).to(bias)
    write_output(attention, new.unflatten(1, (len(gate), width)).transpose(0, 1).float(), bias)
    power = max(target.output_power, 1e-30)
    before = whole.error(start[:, kept]) / power
    return Refit(
        attention.path,
        ridge,
        before,
        target.error(weight) / power,
        error / max(judged.output_power, 1e-30),
    )


def project(attention: Attention, x: Tensor) -> Tensor:
    """What the output projection gives, past whatever stands in for its forward."""
    module = attention.output_projection
    weight, bias = module.get_parameter("weight"), getattr(module, "bias", None)
    return F.linear(x, weight.T if isinstance(module, Conv1D) else weight, bias)
