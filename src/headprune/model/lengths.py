"""How long a sequence may be: the one rule by which every command shortens what was asked for."""

from __future__ import annotations

import warnings
from typing import Any

from transformers import PreTrainedConfig

from headprune.errors import HeadpruneWarning


def most_tokens(config: PreTrainedConfig, tokenizer: Any = None) -> int | None:
    """The longest sequence that a model and its tokenizer take; None where neither says.

    The smaller of ``max_position_embeddings`` (MPT: ``max_seq_len``) of the config's text part and
    the tokenizer's ``model_max_length``: some families count fewer positions than their embeddings
    have rows (RoBERTa: 512 of 514), which only the tokenizer knows.
    """
    text = config.get_text_config()
    stated = (
        getattr(text, "max_position_embeddings", None),
        getattr(text, "max_seq_len", None),
        getattr(tokenizer, "model_max_length", None),
    )
    return min((int(number) for number in stated if number), default=None)


def usable_length(config: PreTrainedConfig, tokenizer: Any, asked: int) -> int:
    """The length of sequences: ``asked``, or the most that model and tokenizer take.

    No command goes beyond that, and none stays below without a warning: a model without as many
    positions would fail, or give numbers for positions that it was never trained on.

    Args:
        config: The model's config.
        tokenizer: Its tokenizer.
        asked: Tokens of a sequence, as they were asked for.
    """
    most = most_tokens(config, tokenizer)
    if most is None or asked <= most:
        return asked
    warnings.warn(
        f"Sequences of {asked} tokens were asked for (--seq-len), and model and tokenizer take "
        f"{most} at most: sequences are cut at {most}.",
        HeadpruneWarning,
        stacklevel=2,
    )
    return most
