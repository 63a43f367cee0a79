"""What cannot be evaluated, or compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headprune.config import EvaluateConfig
from headprune.data.read import Examples
from headprune.data.tokens import around
from headprune.errors import CheckpointError, DataError, HeadpruneError
from headprune.formats.format import is_exported, read_export
from headprune.model.loading import CLASSIFIERS, UNMEASURED, class_ids, task_of


def refuse_exported(model: str) -> None:
    """Refuse an exported model, which torch does not run.

    Raises:
        CheckpointError: Naming what to give instead.
    """
    if is_exported(model):
        raise CheckpointError(
            f"'{model}' was exported as {read_export(Path(model)).format}, and models are measured "
            "in torch. Give the model that it was made of."
        )


def refuse_unfit(
    nets: list[PreTrainedModel], names: list[str], examples: Examples, config: EvaluateConfig
) -> None:
    """Refuses models and examples that do not go together.

    Raises:
        HeadpruneError: Saying what does not.
    """
    task = task_of(nets[0])
    if config.tasks and task != "causal-lm":
        raise HeadpruneError(
            f"--tasks {','.join(config.tasks)}: tasks are for models that generate, and this one "
            f"is a {type(nets[0]).__name__}. Leave out --tasks."
        )
    if config.needle and task != "causal-lm":
        raise HeadpruneError(
            f"A needle is found by a model that goes on with a text, and this one is a "
            f"{type(nets[0]).__name__}. Leave out --needle, or the limit on needle_accuracy."
        )
    if task in UNMEASURED:
        raise HeadpruneError(
            f"There is no metric for the head of a {type(nets[0]).__name__} ({task}) here. "
            "Evaluate it with a script of its task, or evaluate the model below its head: put the "
            "class that AutoModel gives into the config.json of a copy with drop_unexpected."
        )
    if task in CLASSIFIERS and examples.labels is None:
        raise DataError(
            f"A {type(nets[0]).__name__} is evaluated on labelled examples ({task}): name the "
            "--label-column."
        )
    pairs = examples.labels is not None and examples.width == 2
    if task == "features" and not pairs and len(nets) == 1:
        raise DataError(
            "A model without a head is measured against its base (--against BASE), or on sentence "
            "pairs with scores (--text-column FIRST,SECOND --label-column SCORE)."
        )
    if len(nets) == 2:
        tasks = [task_of(net) for net in nets]
        sizes = [net.config.get_text_config().vocab_size for net in nets]
        if tasks[0] != tasks[1] or sizes[0] != sizes[1]:
            raise HeadpruneError(
                f"'{names[0]}' ({tasks[0]}, {sizes[0]:,} tokens) and '{names[1]}' ({tasks[1]}, "
                f"{sizes[1]:,} tokens) cannot be compared token by token; --against takes the "
                "model that this one was made from."
            )
        counts = [net.config.num_labels for net in nets]
        if task == "regression" and counts[0] != counts[1]:
            raise HeadpruneError(
                f"'{names[0]}' gives {counts[0]} numbers for a text, and '{names[1]}' {counts[1]}; "
                "--against takes the model that this one was made from."
            )
        if task in ("classification", "multi-label"):
            _refuse_other_classes(nets, names, examples)


def _refuse_other_classes(
    nets: list[PreTrainedModel], names: list[str], examples: Examples
) -> None:
    ours, theirs = (class_ids(net.config) for net in nets)
    if differing := sorted(set(ours) ^ set(theirs)):
        raise HeadpruneError(
            f"'{names[0]}' and '{names[1]}' do not have the same classes: '{differing[0]}' is one "
            "of only one of them (label2id in config.json); --against takes the model that this "
            "one was made from."
        )
    numbers = [] if ours == theirs else [one for one in examples.labels or () if one not in ours]
    if numbers:
        raise DataError(
            f"'{names[0]}' and '{names[1]}' number their classes differently, so that the label "
            f"'{numbers[0]}' says nothing: name the classes in the data ({', '.join(ours)})."
        )


def refuse_other_tokenizer(ours: Any, base: Any, names: list[str]) -> None:
    """Refuses a base that reads other texts.

    Raises:
        HeadpruneError: Naming a token on which the two disagree.
    """
    ids, base_ids = ours.get_vocab(), base.get_vocab()
    if ids != base_ids:
        differing = sorted(t for t in {**ids, **base_ids} if ids.get(t) != base_ids.get(t))
        raise HeadpruneError(
            f"The tokenizers of '{names[0]}' and '{names[1]}' disagree on {len(differing):,} "
            f"tokens ({differing[0]!r} among them), so the two would read different texts; "
            "--against takes the model that this one was made from."
        )
    for ours_adds, base_adds in zip(around(ours), around(base), strict=True):
        if ours_adds != base_adds:
            raise HeadpruneError(
                f"The tokenizers of '{names[0]}' and '{names[1]}' put other special tokens around "
                f"a text ({ours_adds} and {base_adds}), so the two would read different texts. "
                "Copy the tokenizer files of the base into the folder of the model."
            )
