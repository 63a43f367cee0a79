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
from headprune.exporting.publish import refuse_unprovable
from headprune.model.attention import attention_of
from headprune.model.loading import CLASSIFIERS, class_ids, load_tokenizer, task_of
from headprune.model.opening import as_it_fits, load, result_dtypes
from headprune.model.placement import placed, reshard
from headprune.model.refusals import refuse_without_text
from headprune.model.stored import StoredDtypes
from headprune.placements import in_shards
from headprune.planning.from_scores import plan_from_scores
from headprune.resuming import Run
from headprune.schemas.plan import ModelIdentity, Plan
from headprune.tensors.units import Unit

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
        run: The run of the training.
        again: How a user resumes.
    """

    model: str | Path
    teacher: str | Path
    output: Path
    config: HealConfig
    context: Context
    run: Run
    again: str

    def student(self, weights: bool = True) -> tuple[PreTrainedModel, ModelIdentity]:
        """The model to heal as it is on disk."""
        return load(self.model, Dtype.FLOAT32, self.context.allowed, weights=weights)

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
        net: The student.
        original: The model to match.
        source: Who the student is.
        plan: The plan by which it keeps all heads.
        stored: Element types to write.
        rows: Sequences to train on.
        held_out: Sequences that choose.
        reported: Others, which say how near the chosen weights come.
        collate: Makes a batch of some of them.
        of_step: How many make a step.
        bf16: Whether to compute in bfloat16 (autocast).
    """

    net: PreTrainedModel
    original: PreTrainedModel
    source: ModelIdentity
    plan: Plan
    stored: StoredDtypes
    rows: Dataset
    held_out: Dataset
    reported: Dataset
    collate: Collate
    of_step: int
    bf16: bool

    @classmethod
    def by(cls, job: HealingJob, data: DataConfig) -> Pair:
        """Reads them.

        Raises:
            HeadpruneError: If they do not fit together, or the text is too short.
        """
        config, context = job.config, job.context
        context.stage("loading both models")
        if in_shards():
            skeleton = job.student(weights=False)[0]
            refuse_unmapped(skeleton, job.model)
            refuse_uneven_ties(skeleton, job.model)
        net, source = job.student()
        stored = result_dtypes(net, job.model, config.out_dtype)
        refuse_without_text(net, "heal")
        bf16 = config.bf16 and devices.computes_bfloat16()
        original = job.original(torch.bfloat16 if bf16 else torch.float32)
        _check_pair(net, original)
        plan = plan_from_scores([], Unit.HEAD, [], 0, source, whole=attention_of(net))
        refuse_unprovable(net, plan)
        reshard(net)
        context.stage("reading the data")
        remote = context.allowed.trust_remote_code
        tokenizer = load_tokenizer(job.model, trust_remote_code=remote)
        rows, collate, of_step = batches(Objective.DISTILL, net, tokenizer, data, config)
        parts = _split(rows, of_step)
        return cls(net, original, source, plan, stored, *parts, collate, of_step, bf16)


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
