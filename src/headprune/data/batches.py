"""From text to batches, by task and objective."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from datasets import Dataset, List
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from headprune import processes
from headprune.config import (
    CalibrationConfig,
    ConvertConfig,
    DataConfig,
    HealConfig,
    Objective,
    TrainGatesConfig,
)
from headprune.config.data import Loss, refuse_pairs
from headprune.config.stages import STEP_TOKENS
from headprune.data.audio import read_recordings, recording_rows, speech_of
from headprune.data.images import image_rows, pixels_of, read_images
from headprune.data.read import Examples, Labels, read_examples
from headprune.data.sentences import OF_SENTENCES, by_sentence
from headprune.data.sequences import (
    Label,
    all_windows,
    answer_rows,
    tagged_rows,
    tokenized_rows,
    translation_rows,
)
from headprune.data.text import (
    MOST_HELD_OUT,
    Collate,
    Text,
    cut,
    lengths,
    longest_of,
    rows_of,
    split,
    split_windows,
)
from headprune.data.tokens import around, refuse_beyond
from headprune.errors import DataError, HeadpruneWarning
from headprune.model.batch import (
    Batch,
    SpeechProcessor,
    decoder_inputs,
    modality_of,
    most_tokens,
    padded,
    padding_id,
    usable_length,
)
from headprune.model.embedding import prompt_of
from headprune.model.loading import CLASSIFIERS, class_ids, task_of, vocabulary_of
from headprune.model.refusals import refuse_without_padding, refuse_without_text
from headprune.tensors.draws import generator_for

_ENOUGH = 4_096  # tokens held out to choose by, in eight rows at least
_STEPS = 8  # of a pass over the text, at least
_LOOKED_AT = 1_000  # texts whose mean length counts
_EXAMPLES = 4  # of a step of healing, at least
_MIN_SEQUENCES = 32  # sequences for healing; little text makes shorter ones
_MASKED = 0.15  # share of the tokens, as BERT was trained


class Batches(NamedTuple):
    """Tokenized text and its batches.

    Attributes:
        rows: Its rows.
        collate: Make a batch of rows.
        of_step: Rows per step, of all processes.
        documents: The document that each row begins in; None if a row is one.
    """

    rows: Dataset
    collate: Collate
    of_step: int
    documents: NDArray[np.int64] | None = None

    def split(self) -> tuple[Dataset, Dataset, Dataset]:
        """Hold out a few rows to choose by and as many to report of, evenly over all texts.

        Raises:
            DataError: If there are too few rows.
        """
        rows, documents = self.rows, self.documents
        enough = max(8, math.ceil(_ENOUGH / lengths(rows).mean()))
        count = min(MOST_HELD_OUT, enough, len(rows) // 8)
        if documents is None or not count:
            parts = split(len(rows), len(rows) - 2 * count)
        else:
            parts = split_windows(documents, count)
        if len(parts.fit) < self.of_step or not parts.report:
            raise DataError(
                f"The data makes {len(rows)} rows, too few to train in batches of {self.of_step} "
                "and hold an eighth out to choose by, and an eighth to report of. Give more data, "
                "or shorter sequences or smaller batches."
            )
        fit, choose, report = map(rows.select, parts)
        return fit, choose, report


def batches(
    objective: Objective,
    net: PreTrainedModel,
    tokenizer: Any,
    data: DataConfig,
    config: TrainGatesConfig | HealConfig | CalibrationConfig,
    running: bool = False,
    edge: int = 0,
) -> Batches:
    """Return the batches of a model's task and an objective.

    ``running`` keeps plain text whole, also for a model of single sentences. Packed sequences are
    longer than ``edge`` tokens, so that something is lost to a window.

    Raises:
        DataError: If the text is too short.
        CheckpointError: If it is a classifier that cannot read several texts at once.
    """
    task = task_of(net)
    modality = modality_of(net)
    if data.loss is Loss.ANSWERS and task != "causal-lm":
        raise DataError("loss=answers is of the chats of language models: leave it out.")
    need = (isinstance(config, TrainGatesConfig) and config.batch_size) or 1
    if modality != "text":
        read = _of_images if modality == "images" else _of_recordings
        of_step = config.batch_size or _EXAMPLES * processes.count()
        return Batches(*read(objective, net, tokenizer, data, need), of_step)
    most = most_tokens(net, tokenizer, ["encoder"]) or STEP_TOKENS
    asked = config.seq_len or min(most, max(STEP_TOKENS, 2 * edge))
    seq_len = usable_length(net, tokenizer, asked, ["encoder"])
    vocabulary = vocabulary_of(net)
    refuse_without_padding(net, task)
    refuse_pairs(task, data)
    examples = read_examples(data, tokenizer)
    running_text = not examples.rows_are_documents
    if task in OF_SENTENCES and not running:
        examples = by_sentence(examples)
    if seq_len < 2 and task == "causal-lm":
        raise DataError("--seq-len 1: there is nothing to predict in sequences of one token.")
    packed = objective is not Objective.TASK and not examples.rows_are_documents
    some = examples.spread(_most_rows(config, 1))
    if data.loss is Loss.ANSWERS:
        rows, collate = _of_answers(net, tokenizer, some, seq_len, need)
        return Batches(rows, collate, config.batch_size or _filled(rows, single=False)[0])
    if task in ("causal-lm", "masked-lm") or (packed and task != "seq2seq-lm"):
        closed = task != "causal-lm"

        def windows_of(length: int) -> tuple[Dataset, NDArray[np.int64]]:
            most = _most_rows(config, length)
            return all_windows(examples, tokenizer, length, need, closed, vocabulary, most)

        rows, documents = windows_of(seq_len)
        if config.seq_len is None and len(rows) < _MIN_SEQUENCES:
            shorter = seq_len * len(rows) // _MIN_SEQUENCES
            seq_len = max(8, min(seq_len, 2 * edge), shorter)
            rows, documents = windows_of(seq_len)
        if edge >= seq_len:
            raise DataError(
                f"Heads of the model see a window, and sequences of {seq_len:,} tokens end before "
                f"anything is lost to them. Give a --seq-len above {edge:,}."
            )
        if objective is Objective.MLM:
            refuse_beyond([tokenizer.mask_token_id], tokenizer, vocabulary)
        prefix = len(around(tokenizer).before)

        def collate(features: list[dict[str, Any]]) -> Batch:
            columns = {k: torch.tensor([f[k] for f in features]) for k in features[0]}
            batch = cast(Batch, {**columns, "labels": columns["input_ids"]})
            if not closed:
                batch["use_cache"] = False
                batch["labels"] = batch["labels"].clone()
                batch["labels"][:, :prefix] = -100
            if objective is Objective.MLM:
                ids = batch["input_ids"]
                batch["input_ids"], batch["labels"] = masked(ids, tokenizer, config.seed)
                if not bool((batch["labels"] != -100).any()):
                    raise DataError(
                        "There is no token to mask in a whole batch. Give other text, or a larger "
                        "--seq-len or --batch-size."
                    )
            return batch

        of_step = config.batch_size or _of_step(rows, seq_len)
        return Batches(rows, collate, of_step, documents)
    if task == "seq2seq-lm":
        of_decoder = most_tokens(net, sides=["decoder"])
        rows = translation_rows(some, tokenizer, seq_len, vocabulary, of_decoder)
        collator = pairs_of(net, tokenizer)
    elif task == "token-classification" and objective is Objective.TASK:
        tags = tag_reader(net, examples.labels or ())
        rows = tagged_rows(some, tokenizer, seq_len, tags, vocabulary)
        collator = _padded_of(net, tokenizer)
    else:
        labelled = objective is Objective.TASK and data.label_column is not None
        read_label = label_reader(net, examples.labels or ()) if labelled else None
        rows = tokenized_rows(
            *(some, tokenizer, seq_len, read_label, vocabulary),
            apart=task == "features",
            prompt=prompt_of(net),
        )
        collator = _padded_of(net, tokenizer)
    _refuse_few(rows, need)
    of_step, longest = (
        (config.batch_size, None) if config.batch_size else _filled(rows, single=not data.pairs)
    )

    def collate_cut(features: list[dict[str, Any]]) -> Batch:
        return collator(features if longest is None else [cut(row, longest) for row in features])

    sentences = np.zeros(len(rows), np.int64) if running_text else None
    return Batches(rows, collate_cut, of_step, sentences)


def _most_rows(config: TrainGatesConfig | HealConfig | CalibrationConfig, length: int) -> int:
    """Return how many rows of at least ``length`` tokens a run uses."""
    if isinstance(config, CalibrationConfig):
        return rows_of(config.calibration_tokens, length)
    of_step = config.batch_size or max(1, STEP_TOKENS // length) * processes.count()
    return max(config.steps, _STEPS) * of_step + 2 * MOST_HELD_OUT


def _of_answers(
    net: PreTrainedModel,
    tokenizer: Any,
    examples: Examples,
    seq_len: int,
    need: int,
) -> tuple[Dataset, Collate]:
    rows = answer_rows(examples, tokenizer, seq_len, vocabulary_of(net))
    _refuse_few(rows, need)
    whole = _padded_of(net, tokenizer)

    def collate(features: list[dict[str, Any]]) -> Batch:
        return {**whole(features), "use_cache": False}

    return rows, collate


def _of_images(
    objective: Objective,
    net: PreTrainedModel,
    processor: Any,
    data: DataConfig,
    need: int,
) -> tuple[Dataset, Collate]:
    images = read_images(data)
    labels = images.labels if objective is Objective.TASK else None
    rows = image_rows(images, net, None if labels is None else label_reader(net, labels))
    _refuse_few(rows, need)
    return rows, pixels_of(images, processor)


def _of_recordings(
    objective: Objective,
    net: PreTrainedModel,
    processor: SpeechProcessor,
    data: DataConfig,
    need: int,
) -> tuple[Dataset, Collate]:
    labelled = task_of(net) in CLASSIFIERS
    recordings = read_recordings(data, labelled)
    read_label = label_reader(net, recordings.labels or ()) if labelled else None
    rows = recording_rows(recordings, net, processor, read_label)
    _refuse_few(rows, need)
    whole = objective is Objective.TASK or task_of(net) == "seq2seq-lm"
    return rows, speech_of(recordings, net, processor, whole)


def _refuse_few(rows: Dataset, need: int) -> None:
    if len(rows) < need:
        raise DataError(
            f"The data has {len(rows)} examples, fewer than one batch of {need}. "
            "Give more data or a smaller --batch-size."
        )


def pairs_of(net: PreTrainedModel, tokenizer: Any) -> Collate:
    """Return a function that makes a batch of pairs: source, labels and decoder inputs."""
    whole = _padded_of(net, tokenizer)

    def collate(features: list[dict[str, Any]]) -> Batch:
        batch = whole(features)
        batch["decoder_input_ids"] = decoder_inputs(net, batch["labels"])
        return batch

    return collate


def _padded_of(net: PreTrainedModel, tokenizer: Any) -> Collate:
    return partial(padded, padding=padding_id(net.config, tokenizer))


def _of_step(rows: Dataset, longest: int, least: int = 1) -> int:
    """Return how many rows of a length have ``STEP_TOKENS``; each process has ``least``.

    They are fewer where a pass would have few steps.
    """
    each = max(least, STEP_TOKENS // longest // processes.count())
    return max(1, min(each, len(rows) // _STEPS // processes.count())) * processes.count()


def _filled(rows: Dataset, single: bool) -> tuple[int, int | None]:
    """Return the examples of a step, and the length to cut those to that are much longer."""
    sides = [name for name, kind in rows.features.items() if isinstance(kind, List)]
    whole = _of_step(rows, max(int(lengths(rows, column=n).max()) for n in sides), _EXAMPLES)
    longest = longest_of(rows)
    more = _of_step(rows, longest, _EXAMPLES)
    return (more, longest) if single and more > whole else (whole, None)


def calibration(
    net: PreTrainedModel,
    tokenizer: Any,
    data: DataConfig,
    config: CalibrationConfig,
    command: str,
) -> Text:
    """Read text for scores and refits, as the model's task needs it.

    Raises:
        HeadpruneError: If the model reads no text, or the data does not fit its task.
    """
    refuse_without_text(net, command)
    task = task_of(net)
    objective = Objective.MLM if task == "masked-lm" else Objective.LM
    if task not in ("causal-lm", "masked-lm", "seq2seq-lm"):
        labelled = task in CLASSIFIERS and (
            data.label_column is not None or modality_of(net) != "text"
        )
        objective = Objective.TASK if labelled else Objective.DISTILL
    seq_len = min(config.seq_len, config.calibration_tokens)
    config = config.model_copy(update={"seq_len": seq_len})
    read = batches(objective, net, tokenizer, data, config)
    return Text.calibration(
        read.rows,
        read.collate,
        config.calibration_tokens,
        # of two texts, one would be lost; of a chat, the places of answers
        whole=data.pairs or data.loss is Loss.ANSWERS,
        batch_size=config.batch_size,
    )


def merge_calibration(
    net: PreTrainedModel,
    tokenizer: Any,
    data: DataConfig,
    config: ConvertConfig,
) -> Text:
    """Read plain text in sequences of one length, for any task.

    For a model of single sentences, that is their mean length.

    Raises:
        HeadpruneError: If the model reads no text, or there is too little.
    """
    task = task_of(net)
    refuse_without_text(net, "calibration")
    refuse_without_padding(net, task)
    examples, closed = read_examples(data, tokenizer), task != "causal-lm"
    seq_len = min(config.seq_len, config.calibration_tokens)
    seq_len = usable_length(net, tokenizer, seq_len)
    if task in OF_SENTENCES:
        seq_len = min(seq_len, _mean_length(examples, tokenizer, seq_len))
    known = vocabulary_of(net)
    most = rows_of(config.calibration_tokens, seq_len)
    rows, _ = all_windows(examples, tokenizer, seq_len, 1, closed, known, most)

    def collate(features: list[dict[str, Any]]) -> Batch:
        ids = torch.tensor([feature["input_ids"] for feature in features])
        batch: Batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if net.config.is_encoder_decoder:
            batch["decoder_input_ids"] = ids
        return batch

    text = Text.calibration(rows, collate, config.calibration_tokens)
    tokens, hidden = text.fit.tokens, net.config.get_text_config().hidden_size
    if tokens < hidden:
        raise DataError(
            f"The calibration text has {tokens:,} tokens; at least {hidden:,} are needed, the size "
            "of the hidden states (16,384 are recommended)."
        )
    return text


def _mean_length(examples: Examples, tokenizer: Any, most: int) -> int:
    single = by_sentence(examples)
    if not single.rows_are_documents:
        return most
    rows = tokenized_rows(single.spread(_LOOKED_AT), tokenizer, most, apart=True)
    return max(round(float(lengths(rows).mean())), sum(map(len, around(tokenizer))) + 1)


def masked(input_ids: Tensor, tokenizer: Any, seed: int) -> tuple[Tensor, Tensor]:
    """Mask 15 % of the tokens for masked-language modelling.

    The seed and the ids decide, so that a sequence is masked alike in any batch.

    Returns:
        The masked ids, shape (batch, length), and labels: the original id where masked, else -100.

    Raises:
        DataError: If the tokenizer has no mask token.
    """
    if tokenizer.mask_token_id is None:
        raise DataError("The tokenizer has no mask token, so its model is no masked LM.")
    special = torch.tensor(sorted(set(tokenizer.all_special_ids)))
    chosen = torch.zeros_like(input_ids, dtype=torch.bool)
    for row, ids in enumerate(input_ids):
        generator = generator_for(str(seed).encode() + ids.cpu().numpy().tobytes())
        draw = torch.rand(ids.shape[0], generator=generator)
        draw[torch.isin(ids.cpu(), special)] = 2.0
        allowed = int((draw < 2.0).sum())
        count = min(allowed, max(1, round(_MASKED * allowed)))
        chosen[row, draw.argsort()[:count]] = True
    labels = torch.where(chosen, input_ids, torch.full_like(input_ids, -100))
    return torch.where(chosen, tokenizer.mask_token_id, input_ids), labels


def label_reader(net: PreTrainedModel, column: Labels) -> Callable[[str], Label]:
    """Return a function that reads the labels of a column as the loss takes them.

    A label is a class, a number of a regression, or several classes: the true ones, or a 0 or 1
    for each, as a list or with commas. A column holds either names of classes or their numbers.

    Raises:
        DataError: If a label is no class, or the model gives several numbers, and a column holds
            one.
    """
    task, ids = task_of(net), class_ids(net.config)
    if task == "multi-label":
        return _several_reader(column, ids)
    if task != "regression":
        return _class_numbers(([label] for label in column), ids).__getitem__
    if net.config.num_labels != 1:
        raise DataError(
            f"This {type(net).__name__} gives {net.config.num_labels} numbers for a text, and a "
            "label column holds one. Leave out --label-column; healing needs none."
        )
    return _number


def tag_reader(net: PreTrainedModel, column: Labels) -> Callable[[str], list[int]]:
    """Return a function that reads the tags of sentences as numbers; ``column`` has them all.

    Raises:
        DataError: If a tag is no class.
    """
    ids = class_ids(net.config)
    numbers = _class_numbers((label_parts(tags, ids) for tags in column), ids)
    return lambda tags: [numbers[tag] for tag in label_parts(tags, ids)]


def label_parts(label: str, ids: dict[str, int]) -> list[str]:
    """Return the classes of a label, which is a name, or a list in JSON or with commas."""
    several = [label] if label in ids else label.split(",")
    if label.startswith("["):
        with suppress(ValueError):
            several = json.loads(label)
    return [(p if isinstance(p, str) else json.dumps(p)).strip() for p in several]


def _class_numbers(rows: Iterable[Iterable[str]], ids: dict[str, int]) -> dict[str, int]:
    """Return the number of every label in rows: all are names, or all are numbers.

    Where both fit, they are names.
    """
    numbers = {str(number): number for number in ids.values()}
    first = dict.fromkeys(itertools.chain.from_iterable(rows))
    named, numbered = (first.keys() <= known.keys() for known in (ids, numbers))
    if not (named or numbered):
        unknown = [one for one in first if one not in ids and one not in numbers]
        wrong = (unknown or [one for one in first if one not in ids])[0]
        raise DataError(
            f"The label '{wrong}' is none of the model's labels ({', '.join(ids)}). Use these "
            "names in all rows, or their numbers."
        )
    if named and numbered and any(ids[one] != numbers[one] for one in first):
        warnings.warn(
            f"The labels {', '.join(sorted(first))} are names of the model's classes, and numbers "
            "of others: they are read as names.",
            HeadpruneWarning,
            stacklevel=3,
        )
    known = ids if named else numbers
    return {label: known[label] for label in first}


def _number(label: str) -> float:
    with suppress(ValueError):
        if math.isfinite(number := float(label)):
            return number
    raise DataError(f"The label '{label}' is not a number, and the model predicts a number.")


def _several_reader(column: Labels, ids: dict[str, int]) -> Callable[[str], Label]:
    def true_ones(label: str) -> list[str]:
        return list(filter(None, label_parts(label, ids)))

    numbers = _class_numbers(([] if _is_flags(one, ids) else true_ones(one) for one in column), ids)

    def read(label: str) -> list[float]:
        if _is_flags(label, ids):
            return [float(part) for part in label_parts(label, ids)]
        holding = {numbers[part] for part in true_ones(label)}
        return [float(number in holding) for number in range(len(ids))]

    return read


def _is_flags(label: str, ids: dict[str, int]) -> bool:
    """Return whether a label is a 0 or 1 for each.

    Raises:
        DataError: If it may also name the true ones.
    """
    parts = label_parts(label, ids)
    if len(parts) != len(ids) or not {*parts} <= {"0", "1", "0.0", "1.0"}:
        return False
    holding = {str(number) for number in ids.values()} | {*ids}
    if len(parts) == 2 and len({*parts}) == 2 and {*parts} <= holding:
        raise DataError(
            f"The label '{label}' may be one 0 or 1 per label, or the numbers of the true "
            f"ones. Write the names ({', '.join(ids)}), or 0.0 and 1.0."
        )
    return True
