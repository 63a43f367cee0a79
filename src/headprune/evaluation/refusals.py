"""Models and data that cannot be evaluated, or compared."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headprune.config import DataConfig, EvaluateConfig
from headprune.config.data import Loss, refuse_pairs
from headprune.data.audio import Recordings
from headprune.data.batches import label_parts
from headprune.data.images import Images
from headprune.data.read import Examples
from headprune.data.tokens import around
from headprune.errors import CheckpointError, DataError, HeadpruneError
from headprune.evaluation.speed import refuse_long_prompts
from headprune.evaluation.tagged import refuse_missing_seqeval
from headprune.evaluation.task_table import TASKS, are_pairs
from headprune.formats.format import is_exported, read_export
from headprune.model.embedding import refuse_other_similarity, width_of
from headprune.model.loading import CLASSIFIERS, class_ids, task_of

_FOR_ENGINES = ("gguf", "vllm", "onnx", "openvino")
_MADE_FROM = "--against takes the model that this one was made from"


def refuse_exported(model: str) -> None:
    """Raise CheckpointError for an export to an engine."""
    form = read_export(Path(model)).format if is_exported(model) else ""
    if form in _FOR_ENGINES:
        raise CheckpointError(
            f"'{model}' was exported as {form}, and models are measured in torch. Give the model "
            "that it was made of."
        )


def refuse_unfit(
    nets: list[PreTrainedModel],
    names: list[str],
    examples: Examples | Images | Recordings,
    data: DataConfig,
    config: EvaluateConfig,
) -> None:
    """Raise if models and examples do not go together.

    Raises:
        HeadpruneError: Naming what does not fit, and the remedy.
    """
    task, kind = task_of(nets[0]), type(nets[0]).__name__
    for option, given in (("--tasks", config.tasks), ("--needle", config.needle)):
        if given and task != "causal-lm":
            raise HeadpruneError(
                f"{option} is for models that generate, and this one is a {kind}. Leave it out, "
                "with the limits on it."
            )
    refuse_long_prompts(nets, config.speed_contexts)
    if data.loss is Loss.ANSWERS and (task != "causal-lm" or config.metrics):
        raise HeadpruneError(
            f"loss=answers is of a language model's chats, without --metric; this is a {kind}."
        )
    if not config.metrics:
        refuse_pairs(task, data)
    if task == "ctc" and not config.metrics:
        raise HeadpruneError(f"A {kind} is evaluated by its texts: give --metric wer.")
    if config.metrics and task not in ("causal-lm", "seq2seq-lm", "ctc"):
        raise HeadpruneError(
            f"--metric {config.metrics[0]} is of written text, and a {kind} writes none. "
            "Leave it out; accuracy and F1 of classifiers are measured without it."
        )
    if task not in TASKS:
        raise HeadpruneError(
            f"There is no metric for the head of a {kind} ({task}) here. "
            "Evaluate it with a script of its task, or evaluate the model below its head: put the "
            "class that AutoModel gives into the config.json of a copy with drop_unexpected."
        )
    if task in (*CLASSIFIERS, "token-classification") and examples.labels is None:
        raise DataError(
            f"A {kind} is evaluated on labelled examples ({task}): name the --label-column."
        )
    if task == "token-classification":
        refuse_missing_seqeval(nets[0].config)
    if task == "features" and are_pairs(examples):
        refuse_other_similarity(nets[0])
    elif task == "features" and len(nets) == 1:
        raise DataError(
            "A model without a head is measured against its base (--against BASE), or on sentence "
            "pairs with scores (--text-column FIRST,SECOND --label-column SCORE)."
        )
    if len(nets) == 2:
        _refuse_unlike(nets, names, examples)


def _refuse_unlike(
    nets: list[PreTrainedModel], names: list[str], examples: Examples | Images | Recordings
) -> None:
    kinds = [
        f"{task_of(net)}, {getattr(net.config.get_text_config(), 'vocab_size', 0):,} tokens"
        + (f", {net.config.num_labels} numbers" if task_of(net) == "regression" else "")
        + (f", embeddings of {width_of(net)} numbers" if task_of(net) == "features" else "")
        for net in nets
    ]
    if kinds[0] != kinds[1]:
        raise HeadpruneError(
            f"'{names[0]}' ({kinds[0]}) and '{names[1]}' ({kinds[1]}) cannot be compared; "
            f"{_MADE_FROM}."
        )
    if task_of(nets[0]) not in ("classification", "multi-label", "token-classification"):
        return
    ours, theirs = (class_ids(net.config) for net in nets)
    if differing := sorted(set(ours) ^ set(theirs)):
        raise HeadpruneError(
            f"Only one of '{names[0]}' and '{names[1]}' has the class '{differing[0]}' (label2id "
            f"in config.json); {_MADE_FROM}."
        )
    given: Iterable[str] = examples.labels or ()
    if task_of(nets[0]) != "classification":  # several
        given = (one for label in given for one in label_parts(label, ours))
    numbers = [] if ours == theirs else [one for one in given if one not in ours]
    if numbers:
        raise DataError(
            f"'{names[0]}' and '{names[1]}' number their classes differently, so the label "
            f"'{numbers[0]}' is ambiguous: name the classes in the data ({', '.join(ours)})."
        )


def refuse_other_tokenizer(ours: Any, base: Any, names: list[str]) -> None:
    """Raise HeadpruneError if the tokenizers of model and base read different texts."""
    ids, base_ids = ours.get_vocab(), base.get_vocab()
    if ids != base_ids:
        differing = sorted(t for t in {**ids, **base_ids} if ids.get(t) != base_ids.get(t))
        raise HeadpruneError(
            f"The tokenizers of '{names[0]}' and '{names[1]}' disagree on {len(differing):,} "
            f"tokens ({differing[0]!r} among them), so the two would read different texts; "
            f"{_MADE_FROM}."
        )
    for ours_adds, base_adds in zip(around(ours), around(base), strict=True):
        if ours_adds != base_adds:
            raise HeadpruneError(
                f"The tokenizers of '{names[0]}' and '{names[1]}' put other special tokens around "
                f"a text ({ours_adds} and {base_adds}), so the two would read different texts. "
                "Copy the tokenizer files of the base into the folder of the model."
            )
