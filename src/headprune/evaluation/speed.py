"""Prefill and decoding speed, and peak memory, of one model or of two in turn."""

from __future__ import annotations

import inspect
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from headprune import devices
from headprune.errors import HeadpruneError
from headprune.model.batch import CLASSIFIERS, most_tokens, task_of
from headprune.model.cost import GENERATES
from headprune.model.placement import alone_on_device, input_device, together_on_device
from headprune.model.probes import with_one_end


@dataclass(frozen=True)
class Speed:
    """Throughput, at batch size 1 unless said otherwise; medians of several repeats.

    Attributes:
        prefill_tokens_per_s: Tokens of one forward pass over ``prompt_tokens``.
        decode_tokens_per_s: Greedy tokens after the prompt, with a KV cache; None for models that
            generate nothing.
        decode_by_batch: The same per batch size, all sequences of a batch together.
        prompt_tokens: Length of the prompt.
        decoded_tokens: Length of the continuation.
        peak_memory_bytes: Most memory that the model takes on a GPU of CUDA; None elsewhere.
        device: Where it was measured.
        prefills_s: Seconds of every prefill; models timed in turn have them in the same order.
        decodes_s: The same of every decoding, by batch size.
    """

    prefill_tokens_per_s: float
    decode_tokens_per_s: float | None
    decode_by_batch: dict[int, float]
    prompt_tokens: int
    decoded_tokens: int
    peak_memory_bytes: int | None
    device: str
    prefills_s: tuple[float, ...]
    decodes_s: dict[int, tuple[float, ...]]


PROMPT = 256  # tokens


def measure(
    models: Sequence[PreTrainedModel],
    prompt_tokens: int = PROMPT,
    decoded: int = 16,
    repeats: int = 5,
    batches: Sequence[int] = (1,),
) -> list[Speed]:
    """Time models in turn (A B A B ...), so that a drift of the machine hits all alike.

    Prompt and continuation shrink to the positions of the model with the fewest.
    """
    ids, decoded = _prompt(models, prompt_tokens, decoded)
    generates = task_of(models[0]) in GENERATES
    sizes = sorted({1, *(batches if generates else ())})
    prefills: list[list[float]] = [[] for _ in models]
    decodes: list[dict[int, list[float]]] = [{size: [] for size in sizes} for _ in models]
    peaks: list[list[int]] = [[] for _ in models]
    places = [""] * len(models)
    turns = itertools.product(range(repeats + 1), sizes, enumerate(models))
    with together_on_device(models):
        for repeat, size, (index, model) in turns:
            prefill, decode, peak, places[index] = _once(model, ids.expand(size, -1), decoded)
            peaks[index] += [] if peak is None else [peak]
            if repeat:  # the first round warms up
                decodes[index][size].append(decode)
                if size == 1:
                    prefills[index].append(prefill)
    speeds = []
    for index, by_size in enumerate(decodes):
        rates = {n: n * decoded / median(times) for n, times in by_size.items() if generates}
        speeds.append(
            Speed(
                prefill_tokens_per_s=ids.shape[1] / median(prefills[index]),
                decode_tokens_per_s=rates.get(1),
                decode_by_batch=rates,
                prompt_tokens=ids.shape[1],
                decoded_tokens=decoded,
                peak_memory_bytes=max(peaks[index], default=None),
                device=places[index],
                prefills_s=tuple(prefills[index]),
                decodes_s={n: tuple(times) for n, times in by_size.items() if generates},
            )
        )
    return speeds


def ratios(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    prompt_tokens: int = PROMPT,
    decoded: int = 16,
    repeats: int = 15,
) -> dict[str, NDArray[np.float64]]:
    """Return the speed over that of a reference model, per repeat, at batch size 1.

    Each repeat times both models one after the other, each first in turn.

    Returns:
        "prefill_tokens_per_s" and, for models that generate, "decode_tokens_per_s", of shape
        (repeats,).
    """
    ids, decoded = _prompt([model, reference], prompt_tokens, decoded)
    times = np.empty((repeats + 1, 2, 2))  # repeat; model, reference; prefill, decoding
    with together_on_device((model, reference)):
        for repeat in range(repeats + 1):
            for which in (0, 1) if repeat % 2 else (1, 0):
                times[repeat, which] = _once((model, reference)[which], ids, decoded)[:2]
    faster = times[1:, 1] / np.maximum(times[1:, 0], 1e-12)  # the first round warms up
    generates = task_of(model) in GENERATES
    names = ("prefill_tokens_per_s", *(("decode_tokens_per_s",) if generates else ()))
    return {name: faster[:, column] for column, name in enumerate(names)}


def refuse_long_prompts(models: Sequence[PreTrainedModel], lengths: Iterable[int]) -> None:
    """Raise a HeadpruneError if a prompt is longer than the positions of a model."""
    positions = min((most for model in models if (most := most_tokens(model))), default=sys.maxsize)
    if (longest := max(lengths, default=0)) > positions:
        raise HeadpruneError(
            f"Speed is to be timed after {longest:,} tokens, and a {type(models[0]).__name__} here "
            f"has {positions:,} positions. Give shorter contexts."
        )


def _prompt(
    models: Sequence[PreTrainedModel], prompt_tokens: int, decoded: int
) -> tuple[Tensor, int]:
    """Return a prompt, shape (1, length), and the tokens to decode; both fit into every model."""
    room = prompt_tokens + decoded
    positions = min(most_tokens(m) or room for m in models)
    decoded = min(decoded, positions // 2)
    generator = torch.Generator().manual_seed(0)
    vocabulary = models[0].config.get_text_config().vocab_size
    shape = (1, min(prompt_tokens, positions - decoded))
    ids = torch.randint(0, vocabulary, shape, generator=generator)
    if task_of(models[0]) in CLASSIFIERS and models[0].config.is_encoder_decoder:
        ids = with_one_end(ids, models[0].config)
    return ids, decoded


def _once(
    model: PreTrainedModel, ids: Tensor, decoded: int
) -> tuple[float, float, int | None, str]:
    """Return seconds for the prompt and the tokens after it, peak memory, and the device.

    A model that has just been moved there passes once untimed, which allocates its memory.
    """
    moved = input_device(model).type != devices.chosen().type
    with alone_on_device(model):
        device = input_device(model)
        ids, measures = ids.to(device), device.type == "cuda"
        if moved:
            _times(model, ids, decoded)
        held = torch.cuda.memory_allocated(device) if measures else 0
        times = _times(model, ids, decoded)
        beside = held - model.get_memory_footprint()
        peak = torch.cuda.max_memory_allocated(device) - beside if measures else None
        return *times, peak, str(device)


@torch.no_grad()
def _times(model: PreTrainedModel, ids: Tensor, decoded: int) -> tuple[float, float]:
    """Return seconds for the prompt, and for ``decoded`` greedy tokens after it.

    The prompt of an encoder-decoder is its source.
    """
    task = task_of(model)
    if task not in GENERATES:
        return _seconds(lambda: model(input_ids=ids), ids.device), 0.0
    state: dict[str, Any] = {}
    last: dict[str, int] = {}
    prompt, step = {"input_ids": ids}, "input_ids"
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        last["logits_to_keep"] = 1  # as generate does: those of a long prompt would fill the memory
    if task == "seq2seq-lm":
        prompt, step = {**prompt, "decoder_input_ids": ids[:, :1]}, "decoder_input_ids"

    def prefill() -> None:
        result = model(**prompt, **last, use_cache=True)
        state["cache"], state["next"] = result.past_key_values, result.logits[:, -1:].argmax(-1)
        if task == "seq2seq-lm":
            source = BaseModelOutput(result.encoder_last_hidden_state)
            state["rest"] = {"encoder_outputs": source}

    def decode() -> None:
        for _ in range(decoded):
            inputs = {step: state["next"], **state.get("rest", {})}
            result = model(**inputs, past_key_values=state["cache"], use_cache=True)
            state["next"] = result.logits[:, -1:].argmax(-1)

    return _seconds(prefill, ids.device), _seconds(decode, ids.device)


_waits = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    wait = _waits.get(device.type, lambda: None)
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start
