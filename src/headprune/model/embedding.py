"""The embedding that a model without a head gives a text, pooled as its own files say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from tokenizers import normalizers
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
_POOLINGS = ("cls", MEAN, "max", "lasttoken", "mean_sqrt_len_tokens", "weightedmean")
# older files of sentence-transformers have a flag for each, in the order of their embeddings
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_OF_POOLING = (
    *("pooling_mode", "include_prompt", *_FLAGS),
    *("word_embedding_dimension", "embedding_dimension"),
)
_PACKAGE = "sentence_transformers."
_SILENT = ("Transformer", "Normalize", "Dropout")  # modules that leave cosines as they are
_FAMILIES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
# where the longest text stands, the last word first
_LONGEST = (
    "processing_kwargs.text.max_length",
    *(f"{name}.model_max_length" for name in ("processor_kwargs", "tokenizer_args")),
    "max_seq_length",
)
# settings of the transformer with the values that change no embedding; None for any value
_WITHOUT_EFFECT: dict[str, Any] = {
    **dict.fromkeys((*_LONGEST, "do_lower_case", "unpad_inputs")),
    **dict.fromkeys(("query_length", "document_length")),  # of other calls than encode
    "transformer_task": "feature-extraction",
    "module_output_name": "token_embeddings",
    "modality_config.text.method": "forward",
    "modality_config.text.method_output_name": "last_hidden_state",
    "processing_kwargs.text.truncation": True,
    "processing_kwargs.text.padding": True,
}
# the same for arguments of any loader
_LOADING = (
    *("dtype", "torch_dtype", "attn_implementation", "trust_remote_code"),
    *("padding_side", "use_fast", "use_cache"),
)


class Head(NamedTuple):
    """The task of a model's head.

    Attributes:
        task: See ``task_of``.
        pooling: Poolings of the last hidden states, for a model without a head.
    """

    task: Task
    pooling: tuple[str, ...] = (MEAN,)


class Recipe(NamedTuple):
    """The embedding of ``encode`` in sentence-transformers, by the files beside a model.

    Attributes:
        pooling: Poolings of the last hidden states; of several, the embedding is one long vector.
        prompt: Text before every text.
        longest: Tokens of a text at most; None for the limit of the tokenizer.
        lowers: Whether capitals are read as small letters.
        size: First numbers of an embedding to keep; None for all.
        similarity: Comparison of two embeddings.
        unknown: Settings without a counterpart here.
    """

    pooling: tuple[str, ...] = (MEAN,)
    prompt: str = ""
    longest: int | None = None
    lowers: bool = False
    size: int | None = None
    similarity: str = "cosine"
    unknown: tuple[str, ...] = ()


# of models in memory: a folder may be written anew, and a relative name may mean another
_RECIPES: WeakKeyDictionary[Any, Recipe] = WeakKeyDictionary()


def head_of(model: PreTrainedModel) -> Head:
    """Return the task of a model's head, or its poolings.

    Raises:
        FamilyError: If it has no head, and an embedding of unknown settings.
    """
    task = task_of(model)
    return Head(task, recipe_of(model).pooling) if task == "features" else Head(task)


def recipe_of(model: PreTrainedModel) -> Recipe:
    """Return how an embedding is made; the mean of the hidden states by default.

    Raises:
        FamilyError: If a setting is unknown.
        CheckpointError: If a file cannot be read.
    """
    if model not in _RECIPES:
        _RECIPES[model] = _recipe_beside(model.name_or_path)
    recipe = _RECIPES[model]
    if recipe.unknown:
        raise FamilyError(
            f"The embedding of '{model.name_or_path}' is made by {' and '.join(recipe.unknown)}, "
            f"and headprune follows poolings ({', '.join(_POOLINGS)}), prompts and lengths of "
            "sentence-transformers. Score and prune it without text, or by a plan."
        )
    return recipe


def width_of(model: PreTrainedModel) -> int:
    """Return the numbers of an embedding."""
    recipe = recipe_of(model)
    whole = len(recipe.pooling) * int(model.config.get_text_config().hidden_size)
    return min(whole, recipe.size or whole)


def prompt_of(model: PreTrainedModel) -> str:
    """Return the text before every text to embed; "" for other tasks."""
    return recipe_of(model).prompt if task_of(model) == "features" else ""


def refuse_other_similarity(model: PreTrainedModel) -> None:
    """Refuse pairs of texts whose embeddings a model compares by something else than the cosine.

    Raises:
        FamilyError: Naming it.
    """
    similarity = recipe_of(model).similarity
    if similarity != "cosine":
        raise FamilyError(
            f"'{model.name_or_path}' compares embeddings by {similarity} (similarity_fn_name in "
            "config_sentence_transformers.json), and pairs are compared by the cosine here. "
            "Evaluate single texts with --against."
        )


def read_as_embedded(tokenizer: Any, source: str | Path) -> Any:
    """Set the longest text and the case of letters as ``encode`` does, in place.

    Raises:
        CheckpointError: If a file cannot be read.
    """
    recipe = _recipe_beside(str(source))
    if recipe.longest is not None:
        tokenizer.model_max_length = recipe.longest
    if recipe.lowers:
        before = tokenizer.backend_tokenizer.normalizer
        parts: Any = before if isinstance(before, normalizers.Sequence) else [before] * bool(before)
        whole = normalizers.Sequence([normalizers.Lowercase(), *parts])
        tokenizer.backend_tokenizer.normalizer = whole
    return tokenizer


def _recipe_beside(source: str) -> Recipe:
    modules = _read(source, "modules.json")
    if modules is None:
        return Recipe()
    try:
        return _recipe(source, modules)
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(
            f"'{source}' has a modules.json that names no pooling, or settings beside it that are "
            "none of sentence-transformers. Get the folder again, or remove modules.json for the "
            "mean of the hidden states."
        ) from None


def _recipe(source: str, modules: Any) -> Recipe:
    types = {each["type"]: each["path"] for each in modules}
    paths = {kind.rpartition(".")[2]: path for kind, path in types.items()}
    unknown = [kind for kind in types if not kind.startswith(_PACKAGE)]
    unknown += [f"'{kind}'" for kind in paths if kind not in (*_SILENT, "Pooling")]
    of_pooling = _read(source, f"{paths['Pooling']}/config.json") or {}
    order = [each["type"].rpartition(".")[2] for each in modules]
    if order[:2] != ["Transformer", "Pooling"] or {*order[2:]} & {*order[:2]}:
        unknown.append(f"{', '.join(order)} in this order")
    unknown += [f"{name} {of_pooling[name]!r}" for name in of_pooling if name not in _OF_POOLING]
    given = of_pooling.get("pooling_mode")
    modes = [given] if isinstance(given, str) else given
    modes = modes or [mode for name, mode in _FLAGS.items() if of_pooling.get(name)] or [MEAN]
    unknown += [f"a transformer in '{path}'" for path in [paths["Transformer"]] if path]
    unknown += [f"'{mode}'" for mode in modes if mode not in _POOLINGS]
    settings = _settings(source, paths["Transformer"])
    unknown += [
        f"{name} {value!r}"
        for name, value in settings.items()
        if name.rpartition(".")[2] not in _LOADING
        and (name not in _WITHOUT_EFFECT or _WITHOUT_EFFECT[name] not in (None, value))
    ]
    whole = _read(source, "config_sentence_transformers.json") or {}
    name = whole.get("default_prompt_name")
    prompt = (whole.get("prompts") or {})[name] if name is not None else ""
    if prompt and of_pooling.get("include_prompt") is False:
        unknown.append("a pooling without its prompt (include_prompt)")
    size, compared = whole.get("truncate_dim"), whole.get("similarity_fn_name") or "cosine"
    if "Normalize" in paths and size is None and compared in ("dot", "euclidean"):
        compared = "cosine"  # which then orders pairs alike
    if whole.get("model_type", "SentenceTransformer") != "SentenceTransformer":
        unknown.append(f"a {whole['model_type']}")
    return Recipe(
        tuple(modes),
        prompt or "",
        next((settings[name] for name in _LONGEST if name in settings), None),
        settings.get("do_lower_case", False),
        size,
        compared,
        tuple(unknown),
    )


def _settings(source: str, path: str) -> dict[str, Any]:
    """Return the settings of the transformer by their names, of nested ones with dots."""
    files = (f"sentence_{family}_config.json" for family in _FAMILIES)
    found = (_read(source, f"{path}/{file}" if path else file) for file in files)
    settings: dict[str, Any] = next((one for one in found if one), {})

    def named(part: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
        for name, value in part.items():
            if isinstance(value, dict):
                yield from named(value, f"{before}{name}.")
            elif value is not None:
                yield before + name, value

    return dict(named(settings, ""))


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
    recipe = recipe_of(model)
    whole = torch.cat([_pooled(states, weight, mode) for mode in recipe.pooling], dim=-1)
    return F.normalize(whole[:, : recipe.size], dim=-1)


def _pooled(
    states: Float[Tensor, "examples length hidden"],
    mask: Float[Tensor, "examples length"],
    pooling: str,
) -> Float[Tensor, "examples hidden"]:
    seen = tokens_seen(mask, (pooling,))[..., None]
    if pooling == "max":
        return states.masked_fill(seen == 0, float("-inf")).amax(1)
    if pooling == "weightedmean":
        seen = seen * seen.cumsum(1)
    count = seen.sum(1)
    return (states * seen).sum(1) / (count.sqrt() if "sqrt" in pooling else count)


def tokens_seen(mask: Tensor, pooling: Sequence[str]) -> Tensor:
    """Return the mask of the tokens that an embedding is made of."""
    if not {*pooling} <= {"cls", "lasttoken"}:
        return mask
    length = mask.shape[1]
    real = (mask != 0).int()
    places = {"cls": real.argmax(1), "lasttoken": length - 1 - real.flip(1).argmax(1)}
    return torch.stack([F.one_hot(places[one], length) for one in pooling]).amax(0).to(mask)
