"""The part of the data that shows what heads do, as batches of the model's own task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel

from headprune.config import CalibrationConfig, DataConfig, Objective
from headprune.data.rows import lengths
from headprune.errors import DataError
from headprune.models.evidence import Batch
from headprune.models.loading import Task, load_tokenizer, task_of
from headprune.models.refusals import refuse_without_text
from headprune.training.batches import batches


@dataclass(frozen=True)
class Calibration:
    """Examples of a model's task.

    Attributes:
        task: The task.
        rows: The examples.
        collate: Makes a batch of some of them.
        batch_size: Examples per batch.
        tokens: Tokens of all of them.
        special_ids: Ids of special tokens.
    """

    task: Task
    rows: Dataset
    collate: Callable[[list[dict[str, Any]]], Batch]
    batch_size: int
    tokens: int
    special_ids: tuple[int, ...]

    def batches(self) -> list[Batch]:
        """All examples, in batches."""
        starts = range(0, len(self.rows), self.batch_size)
        return [self._batch(start, start + self.batch_size) for start in starts]

    def whole(self) -> Batch:
        """All examples in one batch, padded where they differ in length."""
        return self._batch(0, len(self.rows))

    def first(self) -> Batch:
        """The first example alone."""
        return self._batch(0, 1)

    def _batch(self, start: int, stop: int) -> Batch:
        return self.collate([self.rows[i] for i in range(start, min(stop, len(self.rows)))])


def calibration(
    net: PreTrainedModel,
    model: str | Path,
    data: DataConfig,
    config: CalibrationConfig,
    what: str,
    trust_remote_code: bool = False,
) -> Calibration:
    """Takes examples from the data, evenly, up to the number of tokens that was asked for.

    Args:
        net: The model.
        model: Its folder or hub id, for the tokenizer.
        data: Where the examples come from.
        config: How many of them.
        what: The command, for messages.
        trust_remote_code: Allow code that comes with the model.

    Raises:
        HeadpruneError: If the model reads no text, or the data does not fit its task.
    """
    refuse_without_text(net, what)
    task = task_of(net)
    if task == "classification" and net.config.num_labels == 1:
        raise DataError(
            f"{what}: this model predicts a number, not a class, which has no loss here. Load it "
            "without its head (the class that AutoModel gives)."
        )
    labels = task == "classification" and data.label_column is not None
    objective = {
        "causal-lm": Objective.LM,
        "seq2seq-lm": Objective.LM,
        "masked-lm": Objective.MLM,
        "classification": Objective.TASK if labels else Objective.DISTILL,
        "features": Objective.DISTILL,
    }[task]
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    fitting = config.model_copy(update={"seq_len": min(config.seq_len, config.tokens)})
    rows, collate = batches(objective, net, tokenizer, data, fitting)
    tokens = lengths(rows)
    count = min(len(rows), max(1, int(config.tokens / (int(tokens.sum()) / len(rows)))))
    numbers = [i * len(rows) // count for i in range(count)]
    chosen = rows.select(numbers)
    return Calibration(
        task,
        chosen,
        collate,
        config.batch_size,
        int(tokens[numbers].sum()),
        tuple(tokenizer.all_special_ids),
    )
