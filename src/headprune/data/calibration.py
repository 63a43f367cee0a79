"""Calibration samples: of a model's own task for scores and refits, of plain text for merges."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.config import CalibrationConfig, ConvertConfig, DataConfig, Objective
from headprune.data.batches import batches
from headprune.data.rows import lengths
from headprune.data.samples import CalibrationSample
from headprune.data.sentences import OF_SENTENCES, by_sentence
from headprune.data.sequences import packed_sequences, tokenized_rows
from headprune.data.sources import Examples, read_examples
from headprune.data.tokens import around
from headprune.errors import DataError
from headprune.model.batch import Batch
from headprune.model.lengths import usable_length
from headprune.model.loading import CLASSIFIERS, task_of, vocabulary_of
from headprune.model.refusals import refuse_without_padding, refuse_without_text

_LOOKED_AT = 1_000  # texts whose length says how long texts are


def calibration(
    net: PreTrainedModel,
    tokenizer: Any,
    data: DataConfig,
    config: CalibrationConfig,
    what: str,
) -> CalibrationSample:
    """Takes examples from the data, evenly, up to the number of tokens that was asked for.

    Args:
        net: The model.
        tokenizer: Its tokenizer.
        data: Where the examples come from.
        config: How many of them.
        what: The command, for messages.

    Raises:
        HeadpruneError: If the model reads no text, or the data does not fit its task.
    """
    refuse_without_text(net, what)
    task = task_of(net)
    labelled = task in CLASSIFIERS and data.label_column is not None
    objective = {
        "causal-lm": Objective.LM,
        "seq2seq-lm": Objective.LM,
        "masked-lm": Objective.MLM,
    }.get(task, Objective.TASK if labelled else Objective.DISTILL)
    fitting = config.model_copy(update={"seq_len": min(config.seq_len, config.calibration_tokens)})
    rows, collate, _ = batches(objective, net, tokenizer, data, fitting)
    return CalibrationSample.spread(
        rows,
        collate,
        config.calibration_tokens,
        cut=not data.pairs,  # of two texts, one would be lost
        batch_size=config.batch_size,
        special_ids=tuple(tokenizer.all_special_ids),
    )


def merge_calibration(
    net: PreTrainedModel,
    tokenizer: Any,
    data: DataConfig,
    config: ConvertConfig,
) -> CalibrationSample:
    """Takes sequences of one length from the data, evenly: text as it is, whatever the task.

    For a model that reads single sentences they are no longer than these, in the mean: one that is
    merged on longer ones is worse on those that it reads.

    Args:
        net: The model.
        tokenizer: Its tokenizer.
        data: Where the text comes from.
        config: How much of it.

    Raises:
        HeadpruneError: If the model reads no text, or there is too little.
    """
    refuse_without_text(net, "calibration")
    refuse_without_padding(net, task_of(net))
    asked, examples = min(config.seq_len, config.calibration_tokens), read_examples(data)
    seq_len = usable_length(net.config, tokenizer, asked)
    if task_of(net) in OF_SENTENCES:
        seq_len = min(seq_len, _mean_length(examples, tokenizer, seq_len))
    rows = packed_sequences(
        examples,
        tokenizer,
        seq_len,
        closed=task_of(net) != "causal-lm",
        vocabulary=vocabulary_of(net),
    )

    def collate(features: list[dict[str, Any]]) -> Batch:
        ids = torch.tensor([feature["input_ids"] for feature in features])
        batch: Batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if net.config.is_encoder_decoder:
            batch["decoder_input_ids"] = ids
        return batch

    sample = CalibrationSample.spread(rows, collate, config.calibration_tokens)
    hidden = net.config.get_text_config().hidden_size
    if sample.tokens < hidden:
        raise DataError(
            f"The calibration text has {sample.tokens:,} tokens; at least {hidden:,} are needed, "
            "as many as the hidden states have dimensions (16,384 are recommended)."
        )
    return sample


def _mean_length(examples: Examples, tokenizer: Any, most: int) -> int:
    """Tokens of a sentence, or of a text of a table; the most, where there is neither."""
    single = by_sentence(examples)
    if not single.rows_are_documents:
        return most
    rows = tokenized_rows(single.spread(_LOOKED_AT), tokenizer, most, apart=True)
    return max(round(float(lengths(rows).mean())), sum(map(len, around(tokenizer))) + 1)
