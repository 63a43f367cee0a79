"""What a model is given of some sequences at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from headprune.errors import CheckpointError


class _Needed(TypedDict):
    input_ids: Int[Tensor, "sequences length"]


class Batch(_Needed, total=False):
    """Inputs of a model, by the names that its forward gives them, and labels where there are some.

    Attributes:
        input_ids: Token ids.
        attention_mask: 0 where there is padding.
        token_type_ids: Which of two texts a token belongs to.
        decoder_input_ids: What the decoder of an encoder-decoder reads.
        decoder_attention_mask: 0 where that is padding.
        labels: A class per sequence, or a token per position, -100 where none is scored.
        use_cache: Whether the model is to keep keys and values.
    """

    attention_mask: Int[Tensor, "sequences length"]
    token_type_ids: Int[Tensor, "sequences length"]
    decoder_input_ids: Int[Tensor, "sequences target_length"]
    decoder_attention_mask: Int[Tensor, "sequences target_length"]
    labels: Int[Tensor, " sequences *length"]
    use_cache: bool


def without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs alone."""
    return {name: value for name, value in batch.items() if name != "labels"}


def doubled(batch: Batch) -> Batch:
    """A batch with every sequence twice: all of them, and then all of them again."""
    both: dict[str, Any] = {
        name: torch.cat([value, value]) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }
    return cast(Batch, both)


def padding_id(config: PreTrainedConfig, tokenizer: Any) -> int:
    """The id to pad with.

    Many decoders have no padding token; any id will do where the attention mask is 0, except that
    a classifier on a decoder recognises padding by the id in its config.
    """
    known = (own_padding_id(config), tokenizer.pad_token_id, 0)
    return next(each for each in known if each is not None)


def own_padding_id(config: PreTrainedConfig) -> int | None:
    """The padding id of a config, if there is one; some write -1 for none."""
    written: int | None = getattr(config, "pad_token_id", None)
    return None if written is None or written < 0 else written


def decoder_inputs(
    model: PreTrainedModel, labels: Int[Tensor, "sequences target_length"]
) -> Int[Tensor, "sequences target_length"]:
    """What the decoder of an encoder-decoder reads to give the labels: each one place later.

    Raises:
        CheckpointError: If its config does not say which token comes first.
    """
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if prepare is not None:
        read: Tensor = prepare(labels)
        return read
    # The model's own config: the decoder's part of it (`get_text_config(decoder=True)`) is made
    # anew, with its class's first token instead of this checkpoint's.
    first = getattr(model.config, "decoder_start_token_id", None)
    pad = getattr(model.config, "pad_token_id", None)
    if first is None:
        raise CheckpointError(
            f"The config of this {type(model).__name__} has no decoder_start_token_id, the token "
            "that its decoder begins with. Add it to its config.json."
        )
    before = labels.masked_fill(labels == -100, first if pad is None else pad)[:, :-1]
    return torch.cat([torch.full_like(labels[:, :1], first), before], dim=1)


def token_mask(batch: Batch, kind: str) -> Bool[Tensor, "sequences length"] | None:
    """Which tokens are real, of those that the queries of a kind of attention stand at."""
    if kind in ("decoder", "cross") and "decoder_input_ids" in batch:
        labels = batch.get("labels")
        return None if labels is None else labels != -100
    mask = batch.get("attention_mask")
    return None if mask is None else mask != 0


def real_tokens(
    x: Float[Tensor, "*positions width"], mask: Tensor | None
) -> Float[Tensor, "tokens width"]:
    """Those positions, one after the other, that are no padding.

    Raises:
        CheckpointError: If padding is masked, and the module lays its positions out otherwise.
    """
    rows = x.flatten(0, -2)
    if mask is None or (mask.numel() != len(rows) and bool(mask.all())):
        return rows
    if mask.numel() != len(rows):
        raise CheckpointError(
            f"An attention module reads {len(rows)} positions, and the texts have {mask.numel()} "
            "with their padding, so the padding cannot be left out. Use --batch-size 1."
        )
    return rows[mask.flatten().to(rows.device)]
