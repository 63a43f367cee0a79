"""Running a model on a batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from headprune.model.batch import without_labels
from headprune.model.placement import on_device


def run_model(model: PreTrainedModel, batch: Mapping[str, Any], head: bool = False) -> Any:
    """Runs the model, or what is below its head, without labels, and keeps no keys and values.

    These would be in memory of all layers at once, and a module that is run twice would find those
    of its first run.
    """
    inputs = on_device(model, without_labels(batch))
    runs = model if head else model.base_model
    takes = inspect.signature(runs.forward).parameters
    if "hidden_states" in takes:
        runs = model  # the base of DINOv3 is its encoder, which takes no pixels
    if "use_cache" in takes:
        inputs["use_cache"] = False
    with _without_cache(model):
        return runs(**inputs)


@contextmanager
def _without_cache(model: PreTrainedModel) -> Iterator[None]:
    """Has no part of a model keep keys and values that is not told to."""
    configs = [c for c in (model.config, model.config.get_text_config()) if hasattr(c, "use_cache")]
    before = [config.use_cache for config in configs]
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config.use_cache = value


def logits_at(model: PreTrainedModel, ids: Tensor, mask: Tensor, places: Tensor) -> Tensor:
    """The logits of some tokens of every sequence; those of the others are never made.

    Args:
        model: A language model.
        ids: Tokens, shape (sequences, tokens).
        mask: 1 where they are no padding, of the same shape.
        places: The tokens whose logits are wanted, shape (sequences, wanted).

    Returns:
        Shape (sequences, wanted, vocabulary).
    """
    inputs = on_device(model, {"input_ids": ids, "attention_mask": mask})
    head, at = model.get_output_embeddings(), places[..., None]

    def chosen(_: Any, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        where = at.to(states[0].device)
        return (states[0].gather(1, where.expand(-1, -1, states[0].shape[-1])), *states[1:])

    if head is None:
        logits: Tensor = model(**inputs, use_cache=False).logits
        return logits.gather(1, at.to(logits.device).expand(-1, -1, logits.shape[-1]))
    hook = head.register_forward_pre_hook(chosen)
    try:
        logits = model(**inputs, use_cache=False).logits
    finally:
        hook.remove()
    return logits


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Has a model attend in plain tensors, for the time of a ``with`` block.

    Masks are tensors then, whatever they stand for, and weights can be seen.
    """
    before = model.config._attn_implementation
    try:
        _attend_by(model, "eager")
        yield
    finally:
        _attend_by(model, before)


def _attend_by(model: PreTrainedModel, name: str) -> None:
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:  # Falcon asks its config at every call
        model.config._attn_implementation = name
