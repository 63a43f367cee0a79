"""From training text to batches, as a model's task and the objective need them."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, cast

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
from headprune.data.rows import widths
from headprune.data.samples import Collate, cut, longest_of
from headprune.data.sentences import OF_SENTENCES, by_sentence
from headprune.data.sequences import (
    label_reader,
    masked,
    packed_sequences,
    tokenized_rows,
    translation_rows,
)
from headprune.data.sources import read_examples
from headprune.data.tokens import around
from headprune.data.unreadable import refuse_beyond
from headprune.errors import DataError
from headprune.model.batch import Batch, decoder_inputs, padding_id
from headprune.model.lengths import usable_length
from headprune.model.loading import task_of, vocabulary_of
from headprune.model.refusals import refuse_without_padding

_STEPS = 8  # of a pass over the text, at least


def pairs_of(net: PreTrainedModel, tokenizer: Any) -> Collate:
    """Makes a batch of pairs: source, target as labels, and what the decoder reads for them."""
    padded = DataCollatorForSeq2Seq(tokenizer)

    def collate(features: list[dict[str, Any]]) -> Batch:
        batch = cast(Batch, dict(padded(features)))
        batch["decoder_input_ids"] = decoder_inputs(net, batch["labels"])
        return batch

    return collate


def _padding(tokenizer: Any, net: PreTrainedModel) -> Any:
    """A tokenizer that pads, also where it has no token for that."""
    if tokenizer.pad_token_id is not None:
        return tokenizer
    made = copy.deepcopy(tokenizer)
    made.pad_token = made.convert_ids_to_tokens(padding_id(net.config, tokenizer))
    return made


class Batches(NamedTuple):
    """Text as a model learns from it.

    Attributes:
        rows: Its rows.
        collate: Makes a batch of some of them.
        of_step: How many make a step of healing: ``batch_size`` sequences of ``seq_len`` tokens,
            or so many shorter ones that they take no more, padded.
    """

    rows: Dataset
    collate: Collate
    of_step: int


def batches(
    objective: Objective,
    net: PreTrainedModel,
    tokenizer: Any,
    data: DataConfig,
    config: TrainGatesConfig | HealConfig | CalibrationConfig,
    running: bool = False,
) -> Batches:
    """Reads text as a model's task and an objective need it.

    Args:
        objective: What is learned.
        net: The model.
        tokenizer: Its tokenizer.
        data: Where the text is.
        config: How long sequences are, and how many make a batch.
        running: Take plain text as it runs, also for a model that reads single sentences.

    Raises:
        DataError: If the text is too short.
        CheckpointError: If it is a classifier that cannot read several texts at once.
    """
    refuse_without_padding(net, task_of(net))
    examples, vocabulary = read_examples(data), vocabulary_of(net)
    if task_of(net) in OF_SENTENCES and not running:
        examples = by_sentence(examples)
    calibrating = isinstance(config, CalibrationConfig)
    need = 1 if calibrating else config.batch_size  # calibration makes do with less than a batch
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
            closed=task_of(net) != "causal-lm",
            vocabulary=vocabulary,
        )
        if objective is Objective.MLM:
            refuse_beyond([tokenizer.mask_token_id], tokenizer, vocabulary)
        given = len(around(tokenizer).before)

        def collate(features: list[dict[str, Any]]) -> Batch:
            columns = {k: torch.tensor([f[k] for f in features]) for k in features[0]}
            batch = cast(Batch, {**columns, "labels": columns["input_ids"]})
            if task_of(net) == "causal-lm":
                batch["use_cache"] = False
                batch["labels"] = batch["labels"].clone()
                batch["labels"][:, :given] = -100
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

        return Batches(rows, collate, config.batch_size)
    if task_of(net) == "seq2seq-lm":
        rows = translation_rows(examples, tokenizer, seq_len, vocabulary)
        collator: Any = pairs_of(net, tokenizer)
    else:
        labelled = objective is Objective.TASK and data.label_column is not None
        read_label = label_reader(net, examples.labels or ()) if labelled else None
        rows = tokenized_rows(examples, tokenizer, seq_len, read_label, vocabulary)
        collator = DataCollatorWithPadding(_padding(tokenizer, net))
    if len(rows) < need:
        raise DataError(
            f"The data has {len(rows)} examples, fewer than one batch of {config.batch_size}. "
            "Give more data or a smaller --batch-size."
        )
    of_step, longest = config.batch_size, None
    if isinstance(config, HealConfig):
        of_step, longest = _of_step(rows, config, seq_len, single=not data.pairs)

    def padded(features: list[dict[str, Any]]) -> Batch:
        some = features if longest is None else [cut(row, longest) for row in features]
        return cast(Batch, dict(collator(some)))

    return Batches(rows, padded, of_step)


def _of_step(
    rows: Dataset, config: HealConfig, seq_len: int, single: bool
) -> tuple[int, int | None]:
    """Rows that make a step, and the length that longer ones are cut at, if that makes them more.

    Few rows still make several steps.
    """
    most = max(1, len(rows) // (_STEPS * config.batch_size))

    def filling(longest: int) -> int:
        return config.batch_size * min(most, max(1, seq_len // longest))

    whole = filling(int(widths(rows).max()))
    longest = longest_of(rows)
    if single and filling(longest) > whole:
        return filling(longest), longest
    return whole, None
