"""Scores of windows: KV heads or layers by their loss, in one forward and one backward pass.

With a share ``a`` of full attention in the output of a head,

    a full + (1 - a) window,        d loss / d a at a = 1  =  sum over tokens of g . (full - window)

where g is the gradient of the loss by the head's output. Of the outputs with a window only the
values are needed. A score is the sum over tokens of the squared slope, as of a Fisher information.
Two kinds of evidence count: text, and answers further back than the window (``data.far``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from headprune.config import CalibrationConfig, DataConfig
from headprune.config.stages import WindowConfig
from headprune.context import Context
from headprune.data.batches import calibration
from headprune.data.far import far_rows
from headprune.data.read import digest_of_data
from headprune.data.text import SHIPPED, Sequences
from headprune.data.tokens import around
from headprune.errors import DataError, PlanError
from headprune.evidence.losses import example_losses
from headprune.evidence.statistics import Units, first_not_finite
from headprune.model.attention import attention_of
from headprune.model.batch import Batch, most_tokens, padded
from headprune.model.cost import CONTEXT, usual_window
from headprune.model.gating import frozen
from headprune.model.open import Model
from headprune.model.residency import recomputing
from headprune.model.windows import AttentionCall, attending, no_windows
from headprune.runtime.modeling_headprune import Attention
from headprune.schemas.manifest import utc_now, versions
from headprune.schemas.records import Window
from headprune.schemas.scores import Scores, ScoresMetadata
from headprune.tensors.units import members

CRITERION = "window"
FAR = 3.0  # weight of far answers beside text
_SEQUENCE = 4  # windows in a sequence
_LEAST_CHUNK = 128  # queries that attend together


def window_scores(
    model: Model, config: WindowConfig, data: DataConfig | None = None, context: Context = Context()
) -> Scores:
    """Score what KV heads or layers lose by a window.

    Args:
        model: A causal language model.
        config: The window, the unit of a score, and the amount of text.
        data: The text; None for that which comes with headprune.
        context: Progress.

    Returns:
        Scores by the criterion "window"; units with high ones keep full attention first. Modules
        that can have no window, or have one, are left out.

    Raises:
        PlanError: If no module can have a window, or the window is no smaller than the context.
        DataError: If there is too little text, or a number is not finite.
    """
    net, source = model.net, data or DataConfig(source=str(SHIPPED))
    attentions, window = candidates(net), window_of(net, model.tokenizer, config)
    text = _text(model, config, window, source)
    near = text.batches()
    far = far_batches(text.rows["input_ids"], model.tokenizer, window, config.seed)
    if not far:
        context.line("no prompt whose answer lies far back fits: scores are by text alone")
    context.stage("scoring")
    units = [members(config.unit, attention.group_sizes) for attention in attentions]
    sums = torch.zeros(2, sum(map(len, units)), dtype=torch.float64)
    batches, kinds = context.each([*near, *far]), [0] * len(near) + [1] * len(far)
    found = slopes(net, attentions, batches, (window.size, window.sinks))
    for part, kind in zip(found, kinds, strict=True):
        sums[kind] += _squares(part, units)
    shares = sums / sums.sum(1, keepdim=True).clamp(min=torch.finfo(sums.dtype).tiny)
    length = len(text.rows[0]["input_ids"])
    about = ScoresMetadata(
        created=utc_now(),
        versions=versions(),
        model=model.identity,
        unit=config.unit,
        modules=tuple(a.path for a in attentions),
        heads=tuple(tuple(a.query_ids) for a in attentions),
        group_sizes=tuple(tuple(a.group_sizes) for a in attentions),
        criteria={CRITERION: "squared slope of the loss by the share of full attention"},
        data=data,
        data_sha256=digest_of_data(source) if Path(source.source).exists() else None,
        calibration=config.part(CalibrationConfig, seq_len=length),
        tokens=text.tokens + sum(batch["input_ids"].numel() for batch in far),
        refits=False,
        window=window,
    )
    return Scores(about, {CRITERION: shares[0] + FAR * shares[1]})


def candidates(net: PreTrainedModel) -> list[Attention]:
    """Return the modules whose KV heads may get a window, as they cache the whole past.

    Raises:
        PlanError: If there is none.
    """
    reasons = no_windows(net)
    result = [a for a in attention_of(net) if a.kv_heads and reasons[a.path] is None]
    if not result:
        why = next(filter(None, reasons.values()), "it has no heads")
        raise PlanError(f"No attention of this {type(net).__name__} can have a window: {why}.")
    return result


def window_of(net: PreTrainedModel, tokenizer: Any, config: WindowConfig) -> Window:
    """Return the window of some settings for a model.

    Raises:
        PlanError: If it is no smaller than the context, or the model takes a shorter one.
    """
    most = most_tokens(net, tokenizer)
    refuse_context(config.context_tokens, most)
    context = config.context_tokens or min(CONTEXT, most or CONTEXT)
    size = config.window or usual_window(context)
    if size + config.sinks >= context:
        raise PlanError(
            f"A window of {size:,} tokens and {config.sinks} sinks leaves nothing out of a context "
            f"of {context:,} tokens. Give a smaller --window or a larger --context."
        )
    return Window(size=size, sinks=config.sinks)


def refuse_context(context: int | None, most: int | None) -> None:
    """Raise PlanError for a context that model and tokenizer do not take."""
    if context is not None and most is not None and context > most:
        raise PlanError(f"--context {context:,}: model and tokenizer take {most:,} at most.")


def sequence_of(
    net: PreTrainedModel, tokenizer: Any, window: Window, seq_len: int | None = None
) -> int:
    """Return the tokens of a sequence that shows what lies beyond a window: four windows at most.

    Raises:
        PlanError: If the model takes none as long, or ``seq_len`` is too short.
    """
    most = most_tokens(net, tokenizer) or sys.maxsize
    length = min(_SEQUENCE * max(window.size, window.sinks), most, seq_len or sys.maxsize)
    if length <= window.size + window.sinks + 1:
        raise PlanError(
            f"Sequences of {length:,} tokens show nothing beyond a window of {window.size:,} and "
            f"{window.sinks} sinks. Give a smaller --window or a larger --seq-len."
        )
    return length


def _text(model: Model, config: WindowConfig, window: Window, data: DataConfig) -> Sequences:
    """Return sequences that are longer than the window; raise PlanError if they cannot be."""
    length = sequence_of(model.net, model.tokenizer, window, config.seq_len)
    tokens = max(config.calibration_tokens, length)
    how = config.part(CalibrationConfig, seq_len=length, calibration_tokens=tokens)
    return calibration(model.net, model.tokenizer, data, how, "score").fit


def far_batches(
    texts: Sequence[Sequence[int]], tokenizer: Any, window: Window, seed: int
) -> list[Batch]:
    """Return texts with questions at the end about facts beyond a window, one a batch."""
    first = len(around(tokenizer).before)
    rows = far_rows(texts, tokenizer, (window.size, window.sinks), first, seed)
    return [{**padded([row], 0), "use_cache": False} for row in rows]


def slopes(
    net: PreTrainedModel,
    attentions: Sequence[Attention],
    batches: Iterable[Batch],
    window: tuple[int, int],
) -> Iterator[list[Float[Tensor, "examples _tokens _heads"]]]:
    """Yield the slopes of the loss by the share of full attention, at full attention.

    The loss is that of every example by itself, the mean over its tokens.

    Args:
        net: The model.
        attentions: The modules.
        batches: Inputs and labels.
        window: Size and sinks.

    Yields:
        Per batch, for every module, a slope of every query head and token, in float32. The first
        tokens, from which the window hides nothing, are left out.

    Raises:
        PlanError: If a module does not call transformers' attention function.
        DataError: If an example has nothing to score, or a slope is not finite.
    """
    live: dict[Any, Tensor] = {}

    def attend(call: AttentionCall) -> Tensor:
        outputs = call.outputs(call.mask)
        if not outputs.requires_grad:  # of the first layer: all weights are frozen
            outputs.requires_grad_()
        if not recomputing():
            with torch.no_grad():
                near = windowed_outputs(call, window)
            lost = outputs.detach()[:, sum(window) :] - near
            outputs.register_hook(partial(seen, call.module, lost))
        return outputs

    def seen(module: Any, lost: Tensor, gradient: Tensor) -> None:
        of_run = (gradient[:, sum(window) :].float() * lost.float()).sum(-1)
        live[module] = live[module] + of_run if module in live else of_run

    with frozen(net), attending(attentions, attend):
        for batch in batches:
            loss = example_losses(net, "causal-lm", batch).sum()
            if loss.requires_grad:  # else no module was called, which `attending` refuses
                loss.backward()
            result = []
            for attention in attentions:
                idle = torch.zeros(len(batch["input_ids"]), 1, attention.query_heads)
                result.append(live.pop(attention.module, idle).cpu())
                if first_not_finite(result[-1]) is not None:
                    raise DataError(
                        f"A slope of '{attention.path}' is not finite: the model overflows in this "
                        "dtype or its weights are damaged. Try --config dtype=float32."
                    )
            yield result


def windowed_outputs(
    call: AttentionCall, window: tuple[int, int]
) -> Float[Tensor, "batch seen heads head_dim"]:
    """Return the outputs with a window, of the queries that it hides something from.

    Queries run in chunks, each over the keys that it may see. With padding, or an attention that
    takes its mask in numbers, all keys are masked instead.
    """
    (size, sinks), length = window, call.query.shape[2]
    if call.mask is not None:
        return call.masked(range(call.key.shape[1]), window)[:, sum(window) :]
    parts, step = [], max(size, _LEAST_CHUNK)
    for start in range(size + sinks, length, step):
        stop, low = min(start + step, length), start - size + 1
        i = torch.arange(start, stop, device=call.query.device)[:, None]
        j = torch.arange(low, stop, device=call.query.device)
        near = F.pad((j <= i) & (i - j < size), (sinks, 0), value=True)
        key, value = (
            torch.cat([states[:, :, :sinks], states[:, :, low:stop]], 2)
            for states in (call.key, call.value)
        )
        part = replace(call, query=call.query[:, :, start:stop], key=key, value=value)
        parts.append(part.outputs(near[None, None]))
    return torch.cat(parts, 1)


def _squares(
    slopes: Sequence[Float[Tensor, "examples _tokens _heads"]], units: Sequence[Units]
) -> Float[Tensor, " units"]:
    """Return the sum over tokens of the squared slope of every unit."""
    squares = [
        part[..., heads].sum(-1).double().square().sum()
        for part, of_module in zip(slopes, units, strict=True)
        for heads in of_module
    ]
    return torch.stack(squares)
