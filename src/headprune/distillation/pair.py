"""What a healing works on: both models, and the text apart into two."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from transformers import PreTrainedModel

from headprune import devices
from headprune.config import DataConfig, Dtype, HealConfig, Objective
from headprune.context import Context
from headprune.data.batches import batches
from headprune.data.rows import apart
from headprune.data.samples import Collate
from headprune.distillation.shards import refuse_uneven_ties, refuse_unmapped
from headprune.errors import DataError, HeadpruneError
from headprune.exporting.prune import whole
from headprune.exporting.write import refuse_unprovable
from headprune.model.loading import CLASSIFIERS, class_ids, task_of
from headprune.model.open import Model, as_it_fits, open_model
from headprune.model.placement import placed, reshard
from headprune.model.refusals import refuse_without_text
from headprune.model.stored import StoredDtypes
from headprune.placements import in_shards
from headprune.surgery.edit import Edit
from headprune.training.work import Work

HELD_OUT = 16  # rows that are not trained on, to choose by, and as many to report of


@dataclass(frozen=True)
class HealingJob:
    """What is healed, by what, and where it is written.

    Attributes:
        model: The model to heal.
        teacher: The model to match.
        output: Folder to write.
        config: How to train.
        context: What it runs in.
        work: Where checkpoints and history are kept.
        go_on: What the user is told after Ctrl-C.
    """

    model: str | Path
    teacher: str | Path
    output: Path
    config: HealConfig
    context: Context
    work: Work
    go_on: str

    def student(self) -> Model:
        """Open the model to heal as it is on disk."""
        return open_model(self.model, Dtype.FLOAT32, self.context.allowed)

    def original(self, dtype: torch.dtype) -> PreTrainedModel:
        """The model to match, where it computes."""
        allowed = self.context.allowed
        original = as_it_fits(
            self.teacher,
            dtype,
            trust_remote_code=allowed.trust_remote_code,
            drop_unexpected=allowed.drop_unexpected,
        )
        return placed(original)


@dataclass(frozen=True)
class Pair:
    """The models of a job and the text, read.

    Attributes:
        model: The student.
        original: The model to match.
        edit: The edit that leaves the student as it is.
        stored: Element types to write.
        rows: Sequences to train on.
        held_out: Sequences that choose.
        reported: Others, which say how near the chosen weights come.
        collate: Makes a batch of some of them.
        of_step: How many make a step.
        bf16: Whether to compute in bfloat16 (autocast).
    """

    model: Model
    original: PreTrainedModel
    edit: Edit
    stored: StoredDtypes
    rows: Dataset
    held_out: Dataset
    reported: Dataset
    collate: Collate
    of_step: int
    bf16: bool

    @property
    def net(self) -> PreTrainedModel:
        """The student with its weights."""
        return self.model.net

    @classmethod
    def by(cls, job: HealingJob, data: DataConfig) -> Pair:
        """Reads them.

        Raises:
            HeadpruneError: If they do not fit together, or the text is too short.
        """
        config, context = job.config, job.context
        context.stage("loading both models")
        model = job.student()
        if in_shards():
            refuse_unmapped(model)
            refuse_uneven_ties(model.skeleton, job.model)
        net = model.net
        stored = model.result_dtypes(config.out_dtype)
        refuse_without_text(net, "heal")
        bf16 = config.bf16 and devices.computes_bfloat16()
        original = job.original(torch.bfloat16 if bf16 else torch.float32)
        _check_pair(net, original)
        edit = whole(model)
        refuse_unprovable(net, edit.plan)
        reshard(net)
        context.stage("reading the data")
        rows, collate, of_step = batches(Objective.DISTILL, net, model.tokenizer, data, config)
        parts = _split(rows, of_step)
        return cls(model, original, edit, stored, *parts, collate, of_step, bf16)


def _check_pair(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Refuses a teacher whose outputs are of another kind or size."""
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
    said = f"over {getattr(config, 'vocab_size', 0):,} tokens"  # models of images have none
    if task in CLASSIFIERS or task == "token-classification":
        said += f", with {net.config.num_labels:,} labels"
    if task == "features":
        said += f", with hidden states of {config.hidden_size:,} channels"
    return said


def _split(rows: Dataset, batch_size: int) -> tuple[Dataset, Dataset, Dataset]:
    """Split off a few rows that choose and as many that report, evenly over all texts."""
    count = min(HELD_OUT, len(rows) // 8)
    if len(rows) - 2 * count < batch_size or not count:
        raise DataError(
            f"The text makes {len(rows)} rows, too few to train in batches of {batch_size} and "
            "hold some out. Give more text, or a smaller --seq-len."
        )
    trained, held = apart(len(rows), 2 * count)
    return rows.select(trained), rows.select(held[::2]), rows.select(held[1::2])
