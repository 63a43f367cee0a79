"""Student, teacher, and the text: to train on, to choose by, to report of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from transformers import PreTrainedModel

from headprune import devices
from headprune.config import DataConfig, Dtype, HealConfig, HealTrain, Objective
from headprune.context import Context
from headprune.data.batches import batches
from headprune.data.text import Collate
from headprune.distillation.shards import refuse_uneven_ties, refuse_unmapped
from headprune.errors import HeadpruneError
from headprune.formats.format import read_export
from headprune.io.ownership import EXPORTED
from headprune.model.cost import KVCache
from headprune.model.loading import CLASSIFIERS, class_ids, task_of
from headprune.model.open import Model, open_model, read_model
from headprune.model.placement import move_to_device, reshard
from headprune.model.refusals import refuse_without_text
from headprune.model.stored import StoredDtypes, find_file
from headprune.placements import in_shards
from headprune.result.prune import whole
from headprune.result.write import refuse_unprovable
from headprune.surgery.edit import Edit


@dataclass(frozen=True)
class Pair:
    """Student, teacher and text.

    Attributes:
        model: The student, in float32; what LoRA leaves as it is may stay in bfloat16.
        teacher: The model to match.
        teacher_source: Its folder or hub id.
        edit: The edit that leaves the student as it is.
        stored: Element types to write.
        rows: Sequences to train on.
        held_out: Sequences to choose by.
        reported: Sequences to report of.
        collate: Makes a batch.
        of_step: Sequences per step.
        conversion: Changes of the export that wrote the student, a sentence each.
        bf16: Compute in bfloat16 (autocast).
    """

    model: Model
    teacher: PreTrainedModel
    teacher_source: str | Path
    edit: Edit
    stored: StoredDtypes
    rows: Dataset
    held_out: Dataset
    reported: Dataset
    collate: Collate
    of_step: int
    conversion: tuple[str, ...]
    bf16: bool


def read_pair(
    model: str | Path,
    teacher: str | Path,
    data: DataConfig,
    config: HealConfig,
    context: Context,
) -> Pair:
    """Load both models, and read the text.

    Raises:
        HeadpruneError: If they do not fit together, or the text is too short.
    """
    bf16 = config.bf16 and devices.computes_bfloat16()
    original = read_model(teacher, torch.bfloat16 if bf16 else torch.float32, context.allowed)
    record = find_file(model, EXPORTED, ask=True)
    conversion = () if record is None else read_export(record.parent).changes
    context.stage("loading both models")
    frozen = bf16 and config.train is HealTrain.LORA
    dtype = Dtype.AUTO if frozen else Dtype.FLOAT32
    student = open_model(model, dtype, context.allowed, calibrates=frozen)
    if in_shards():
        refuse_unmapped(student)
        refuse_uneven_ties(student.skeleton, model)
    refuse_without_text(student.net, "heal")
    stored = student.result_dtypes(config.out_dtype)
    matched = move_to_device(original.weighted())
    _refuse_mismatch(student.net, matched)
    edit = whole(student)
    refuse_unprovable(student, edit.plan)
    reshard(student.net)
    context.stage("reading the data")
    edge = KVCache.of(student.net).lost_beyond(KVCache.of(matched))
    text = batches(Objective.DISTILL, student.net, student.tokenizer, data, config, edge=edge)
    read = (*text.split(), text.collate, text.of_step)
    return Pair(student, matched, teacher, edit, stored, *read, conversion, bf16)


def _refuse_mismatch(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Refuse a teacher whose outputs are of another kind or size."""
    sizes = [_sizes(net) for net in (student, teacher)]
    if task_of(student) != task_of(teacher) or sizes[0] != sizes[1]:
        raise HeadpruneError(
            f"The model to heal is a {type(student).__name__} {sizes[0]}, the teacher a "
            f"{type(teacher).__name__} {sizes[1]}. Give the model it came from."
        )
    classes = [class_ids(net.config) for net in (student, teacher)]
    reordered = set(classes[0]) == set(classes[1]) and classes[0] != classes[1]
    if task_of(student) in ("classification", "multi-label") and reordered:
        raise HeadpruneError(
            "The model to heal and the teacher number their classes differently (label2id in "
            "config.json), so that it would learn the wrong ones. Give the model it came from."
        )


def _sizes(net: PreTrainedModel) -> str:
    config, task = net.config.get_text_config(), task_of(net)
    words = f"over {getattr(config, 'vocab_size', 0):,} tokens"  # models of images have none
    if task in CLASSIFIERS or task == "token-classification":
        words += f", with {net.config.num_labels:,} labels"
    if task == "features":
        words += f", with hidden states of {config.hidden_size:,} channels"
    return words
