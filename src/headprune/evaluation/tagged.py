"""Tags of words: how many are right, and how many entities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from headprune.evaluation.metrics import Floats
from headprune.model.loading import class_ids
from headprune.packages import refuse_missing

TAGS, ENTITIES = ("tag_hits", "tags"), ("entity_counts",)
_ENTITY = ("B-", "I-", "E-", "S-", "L-", "U-")


def names_entities(config: PreTrainedConfig) -> bool:
    """Return whether tags mark entities: O, and others such as B-PER."""
    names = class_ids(config)
    return "O" in names and all(name == "O" or name.startswith(_ENTITY) for name in names)


def refuse_missing_seqeval(config: PreTrainedConfig) -> None:
    """Refuse to count entities without the package.

    Raises:
        HeadpruneError: Saying how to install it.
    """
    if names_entities(config):
        refuse_missing("F1 of entities", "seqeval")


def tag_columns(
    said: Sequence[NDArray[np.int64]],
    rows: Dataset,
    config: PreTrainedConfig,
) -> dict[str, Floats]:
    """Return, per sentence, the words with the right tag, all words, and counts of entities.

    Args:
        said: Numbers of the predicted tags, of all tokens.
        rows: The sentences, with labels at the first token of every word.
        config: That of the model whose classes number both.
    """
    names = {number: name for name, number in class_ids(config).items()}
    hits, counts, entities = [], [], []
    for predicted, labels in zip(said, rows["labels"], strict=True):
        of_words = [place for place, label in enumerate(labels) if label != -100]
        got = [names[int(predicted[place])] for place in of_words]
        wanted = [names[labels[place]] for place in of_words]
        hits.append(sum(a == b for a, b in zip(got, wanted, strict=True)))
        counts.append(len(wanted))
        if names_entities(config):
            entities.append(_entities(got, wanted))
    columns: dict[str, Any] = dict(zip(TAGS, (hits, counts), strict=True))
    if entities:
        columns |= dict(zip(ENTITIES, [entities], strict=True))
    return {name: np.array(column, np.float64) for name, column in columns.items()}


def _bioes(tag: str) -> str:
    """Return a tag as seqeval knows it: the U and L of BILOU are its S and E."""
    return {"U-": "S-", "L-": "E-"}.get(tag[:2], tag[:2]) + tag[2:]


def _entities(got: Sequence[str], wanted: Sequence[str]) -> tuple[int, int, int]:
    from seqeval.metrics.sequence_labeling import get_entities

    said, true = (set(get_entities([_bioes(tag) for tag in tags])) for tags in (got, wanted))
    return len(said & true), len(said), len(true)
