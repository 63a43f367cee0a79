"""What a model's head is for, which decides on losses, metrics and how text is read."""

from __future__ import annotations

from typing import Literal

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from headprune.errors import FamilyError
from headprune.runtime import modeling_headprune

Task = Literal[
    "causal-lm",
    "seq2seq-lm",
    "masked-lm",
    "classification",
    "multi-label",
    "regression",
    "features",
    "token-classification",
    "question-answering",
    "multiple-choice",
    "next-sentence",
    "pre-training",
]
CLASSIFIERS: tuple[Task, ...] = ("classification", "multi-label", "regression")
# heads that a teacher can be matched on, and whose own loss and metric headprune has not
UNMEASURED: tuple[Task, ...] = (
    "token-classification",
    "question-answering",
    "multiple-choice",
    "next-sentence",
    "pre-training",
)

_TASKS: dict[str, Task] = {
    "AutoModelForCausalLM": "causal-lm",
    "AutoModelForImageTextToText": "causal-lm",
    "AutoModelForSeq2SeqLM": "seq2seq-lm",
    "AutoModelForSpeechSeq2Seq": "seq2seq-lm",
    "AutoModelForMaskedLM": "masked-lm",
    "AutoModelForSequenceClassification": "classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
    "AutoModelForNextSentencePrediction": "next-sentence",
    "AutoModelForPreTraining": "pre-training",
}


def task_of(model: PreTrainedModel) -> Task:
    """Return what a model's head is for; "features" for a model without one.

    The one place that decides on losses and metrics. Of a head for sequences, ``problem_type``
    decides as in transformers, where one output without a problem type is a regression.

    Raises:
        FamilyError: If it is a language model that sees what it is to predict.
    """
    native = native_class(type(model))
    known = modeling_headprune.auto_classes(native.config_class)
    task: Task = next(
        (task for auto, task in _TASKS.items() if known.get(auto) is native), "features"
    )
    both_ways = not getattr(model.config, "is_decoder", True)
    if task == "causal-lm" and both_ways and "AutoModelForMaskedLM" in known:
        raise FamilyError(
            f"This {native.__name__} attends to what comes after a token as well, since its "
            'config.json lacks "is_decoder": true, and so is no language model. Add that, or name '
            f"{known['AutoModelForMaskedLM'].__name__} as its architecture."
        )
    problem = getattr(model.config, "problem_type", None)
    if task != "classification":
        return task
    if problem == "multi_label_classification":
        return "multi-label"
    if problem == "regression" or (problem is None and model.config.num_labels == 1):
        return "regression"
    return task


def class_ids(config: PreTrainedConfig) -> dict[str, int]:
    """The number of each class of a classifier, by its name."""
    known = config.label2id or {name: number for number, name in (config.id2label or {}).items()}
    return {name: int(number) for name, number in known.items()}


def native_class(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class of transformers behind a pruned one; a stock class is its own."""
    # what shards a model makes a class of its own, as FSDPLlamaForCausalLM
    known = (base for base in cls.__mro__ if getattr(transformers, base.__name__, None) is base)
    native: type[PreTrainedModel] = next(known, cls)
    return native


def auto_class_of(model: PreTrainedModel) -> str:
    """The Auto class that leads to a model's class; "AutoModel" if none does."""
    native = native_class(type(model))
    known = modeling_headprune.auto_classes(native.config_class)
    # several may lead there: the one that says what the head is for, before AutoModelForPreTraining
    return next((auto for auto in (*_TASKS, *known) if known.get(auto) is native), "AutoModel")
