"""The embedding that a model without a head gives a text, pooled as its own files say."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from headprune.errors import CheckpointError, DataError, FamilyError
from headprune.io import hub
from headprune.model.batch import Batch, Task, task_of, token_mask
from headprune.model.passes import run_model
from headprune.model.stored import find_file
from headprune.tensors.dtypes import in_float32

MEAN = "mean"
_POOLINGS = ("cls", MEAN, "max", "lasttoken", "mean_sqrt_len_tokens")
# other files of sentence-transformers have a flag for each
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_SILENT = ("Transformer", "Normalize")  # modules that leave cosines as they are


class Head(NamedTuple):
    """The task of a model's head.

    Attributes:
        task: See ``task_of``.
        pooling: Pooling of the last hidden states, for a model without a head.
    """

    task: Task
    pooling: str = MEAN


def head_of(model: PreTrainedModel) -> Head:
    """Return the task of a model's head, or its pooling.

    Raises:
        FamilyError: If it has no head, and an unknown pooling.
    """
    task = task_of(model)
    return Head(task, pooling_of(model)) if task == "features" else Head(task)


def pooling_of(model: PreTrainedModel) -> str:
    """Return the pooling of sentence-transformers beside a model's source; the mean by default.

    Raises:
        FamilyError: If the pooling is unknown.
        CheckpointError: If ``modules.json`` or the config of its pooling cannot be read.
    """
    return _pooling_beside(model.name_or_path)


@cache
def _pooling_beside(source: str) -> str:
    modules = _read(source, "modules.json")
    if modules is None:
        return MEAN
    try:
        kinds = {each["type"].rpartition(".")[2]: each["path"] for each in modules}
        further = [kind for kind in kinds if kind not in (*_SILENT, "Pooling")]
        settings = _read(source, f"{kinds['Pooling']}/config.json") or {}
        pooling = settings.get("pooling_mode")
        modes = [pooling] if isinstance(pooling, str) else pooling
        modes = modes or [mode for name, mode in _FLAGS.items() if settings.get(name)] or [MEAN]
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(
            f"'{source}' has a modules.json that names no pooling. Get the folder again, or remove "
            "that file for the mean of the hidden states."
        ) from None
    unknown = [*further, *(mode for mode in modes if mode not in _POOLINGS)]
    if unknown or len(modes) > 1:
        what = f"'{unknown[0]}'" if unknown else " and ".join(modes)
        raise FamilyError(
            f"The embedding of '{source}' is made by {what} (modules.json), and headprune knows "
            f"{', '.join(_POOLINGS)}, one at a time. Score and prune it without text, or by a plan."
        )
    return str(modes[0])


def _read(source: str, name: str) -> Any:
    if not source or not (Path(source).is_dir() or hub.may_be_id(source)):
        return None
    file = find_file(source, name, ask=True)
    try:
        return None if file is None else json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"'{name}' of '{source}' cannot be read ({error}). Get the folder again."
        ) from None


def embedding(model: PreTrainedModel, batch: Batch) -> Float[Tensor, "examples hidden"]:
    """Return the outputs below a model's head, pooled and normalised.

    Raises:
        DataError: If an example is nothing but padding.
    """
    states = in_float32(run_model(model, batch).last_hidden_state)
    mask = token_mask(batch, "self")
    weight = states.new_ones(states.shape[:2]) if mask is None else mask.to(states)
    if not bool(weight.any(1).all()):
        raise DataError("An example has no tokens, only padding. Leave empty texts out.")
    return F.normalize(_pooled(states, weight, head_of(model).pooling), dim=-1)


def _pooled(
    states: Float[Tensor, "examples length hidden"],
    mask: Float[Tensor, "examples length"],
    pooling: str,
) -> Float[Tensor, "examples hidden"]:
    seen = tokens_seen(mask, pooling)[..., None]
    if pooling == "max":
        return states.masked_fill(seen == 0, float("-inf")).amax(1)
    # the square root of the length is one factor of a whole embedding, which has length 1 anyway
    return (states * seen).sum(1) / seen.sum(1)


def tokens_seen(mask: Tensor, pooling: str) -> Tensor:
    """Return the mask of the tokens that an embedding is made of."""
    if pooling not in ("cls", "lasttoken"):
        return mask
    length = mask.shape[1]
    real = (mask != 0).int()
    at = real.argmax(1) if pooling == "cls" else length - 1 - real.flip(1).argmax(1)
    return F.one_hot(at, length).to(mask)
