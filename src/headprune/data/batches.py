"""From training text to batches, as a model's task and the objective need them."""

from __future__ import annotations

from typing import Any, cast

import torch
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, PreTrainedModel

from headprune.config import (
    CalibrationConfig,
    DataConfig,
    HealConfig,
    Objective,
    TrainGatesConfig,
)
from headprune.data.samples import Collate
from headprune.data.sequences import masked, packed_sequences, tokenized_rows, translation_rows
from headprune.data.sources import read_examples
from headprune.data.unreadable import refuse_beyond
from headprune.errors import DataError
from headprune.model.batch import Batch, decoder_inputs
from headprune.model.lengths import usable_length
from headprune.model.loading import task_of, vocabulary_of


def pairs_of(net: PreTrainedModel, tokenizer: Any) -> Collate:
    """Makes a batch of pairs: source, target as labels, and what the decoder reads for them."""
    padded = DataCollatorForSeq2Seq(tokenizer)

    def collate(features: list[dict[str, Any]]) -> Batch:
        batch = cast(Batch, dict(padded(features)))
        batch["decoder_input_ids"] = decoder_inputs(net, batch["labels"])
        return batch

    return collate


def batches(
    objective: Objective,
    net: PreTrainedModel,
    tokenizer: Any,
    data: DataConfig,
    config: TrainGatesConfig | HealConfig | CalibrationConfig,
) -> tuple[Dataset, Collate]:
    """Rows of training text, and what makes a batch of some of them.

    Raises:
        DataError: If the text is too short.
    """
    examples, vocabulary = read_examples(data), vocabulary_of(net)
    # calibration makes do with fewer sequences than a batch
    need = 1 if isinstance(config, CalibrationConfig) else config.batch_size
    seq_len = usable_length(net.config, tokenizer, config.seq_len)
    if seq_len < 2 and objective is Objective.LM and task_of(net) == "causal-lm":
        raise DataError("--seq-len 1: there is nothing to predict in sequences of one token.")
    packed = objective is not Objective.TASK and not examples.rows_are_documents
    if task_of(net) in ("causal-lm", "masked-lm") or (packed and task_of(net) != "seq2seq-lm"):
        rows = packed_sequences(
            examples,
            tokenizer,
            seq_len,
            need=need,
            specials=task_of(net) != "causal-lm",
            vocabulary=vocabulary,
        )
        if objective is Objective.MLM:
            refuse_beyond([tokenizer.mask_token_id], tokenizer, vocabulary)

        def collate(features: list[dict[str, Any]]) -> Batch:
            columns = {k: torch.tensor([f[k] for f in features]) for k in features[0]}
            batch = cast(Batch, {**columns, "labels": columns["input_ids"]})
            if task_of(net) == "causal-lm":
                batch["use_cache"] = False
            if objective is Objective.MLM:
                batch["input_ids"], batch["labels"] = masked(
                    batch["input_ids"], tokenizer, config.seed
                )
                if not bool((batch["labels"] != -100).any()):
                    raise DataError(
                        "There is no token to mask in a whole batch, only special ones. Give other "
                        "text, or a larger --seq-len or --batch-size."
                    )
            return batch

        return rows, collate
    if task_of(net) == "seq2seq-lm":
        rows = translation_rows(examples, tokenizer, seq_len, vocabulary)
        collator: Any = pairs_of(net, tokenizer)
    else:
        labels = net.config.label2id if objective is Objective.TASK else None
        rows = tokenized_rows(examples, tokenizer, seq_len, labels, vocabulary)
        collator = DataCollatorWithPadding(tokenizer)
    if len(rows) < need:
        raise DataError(
            f"The data has {len(rows)} examples, fewer than one batch of {config.batch_size}. "
            "Give more data or a smaller --batch-size."
        )
    return rows, lambda features: cast(Batch, dict(collator(features)))
