"""Loading models by folder or hub id, and saying clearly why when it can't be done."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from headprune.errors import CheckpointError, FamilyError
from headprune.runtime import modeling_headprune

Task = Literal["causal-lm", "seq2seq-lm", "masked-lm", "classification", "features"]

_TASKS: dict[str, Task] = {
    "AutoModelForCausalLM": "causal-lm",
    "AutoModelForSeq2SeqLM": "seq2seq-lm",
    "AutoModelForSpeechSeq2Seq": "seq2seq-lm",
    "AutoModelForMaskedLM": "masked-lm",
    "AutoModelForSequenceClassification": "classification",
}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def from_pretrained(model: str | Path, **kwargs: Any) -> PreTrainedModel:
    """Loads a model as the class its config names; results of headprune included.

    Args:
        model: A folder or a hub id.
        **kwargs: As for ``AutoModel.from_pretrained``, for instance ``dtype``, ``device_map``,
            ``attn_implementation``. ``auto_class="AutoModelForSequenceClassification"`` asks for
            another head than the one in the config.

    Returns:
        The model in eval mode.

    Raises:
        CheckpointError: If there is nothing to load, or only pickles.
    """
    auto_class = kwargs.pop("auto_class", None)
    selection = {k: kwargs[k] for k in ("revision", "trust_remote_code") if k in kwargs}
    config = kwargs.pop("config", None) or load_config(model, **selection)
    refuse_pickles(model)
    cls = model_class(config, auto_class)
    try:
        return cls.from_pretrained(
            str(model), config=config, use_safetensors=True, **{"dtype": "auto"} | kwargs
        ).eval()
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"'{model}' does not load as {cls.__name__}: {error}") from error


def refuse_without_text(model: PreTrainedModel, what: str) -> None:
    """Refuses a model of images or sound where text is needed.

    Raises:
        FamilyError: Saying what can be done with it.
    """
    takes = set(inspect.signature(model.forward).parameters)
    other = takes & {"pixel_values", "input_features", "input_values"}
    if other or "input_ids" not in takes:
        raise FamilyError(
            f"{type(model).__name__} takes {', '.join(sorted(other)) or 'no text'}, and {what} "
            "reads text. Choose its heads in Python and cut them with 'headprune prune --plan'."
        )


def load_config(model: str | Path, **kwargs: Any) -> PreTrainedConfig:
    """Reads a model's config.

    Raises:
        CheckpointError: If there is no such folder or hub id, or its config cannot be read.
    """
    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise CheckpointError(
            f"'{model}' has no config.json, so it is no model folder. Give the folder that "
            "save_pretrained wrote, or a hub id."
        )
    try:
        return AutoConfig.from_pretrained(str(model), **kwargs)
    except (OSError, ValueError) as error:
        what = "read its config" if path.is_dir() else "find a folder or hub model of that name"
        raise CheckpointError(f"'{model}': could not {what}. {_first_line(error)}") from None


def load_tokenizer(model: str | Path, **kwargs: Any) -> Any:
    """Loads the tokenizer beside a model.

    Raises:
        CheckpointError: If there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(str(model), **kwargs)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"'{model}' has no usable tokenizer, and text data needs one. Copy the tokenizer "
            f"files of the original model into the folder. {_first_line(error)}"
        ) from None


def model_class(config: PreTrainedConfig, auto_class: str | None = None) -> type[PreTrainedModel]:
    """The class to build a model of ``config`` with: the stock one, or its pruned form."""
    name = (config.architectures or [None])[0]
    native = getattr(transformers, name, None) if name else None
    if auto_class is not None or native is None:
        mapping = getattr(transformers, auto_class or "AutoModel")._model_mapping
        if type(config) not in mapping:
            raise CheckpointError(
                f"transformers has no {auto_class or 'AutoModel'} for model type "
                f"'{config.model_type}'."
            )
        native = mapping[type(config)]
    return modeling_headprune.pruned_class(native) if getattr(config, "headprune", None) else native


def task_of(model: PreTrainedModel) -> Task:
    """What a model's head is for; "features" if it has none that headprune evaluates."""
    native = native_class(type(model))
    known = modeling_headprune.auto_classes(native.config_class)
    return next((task for auto, task in _TASKS.items() if known.get(auto) is native), "features")


def native_class(cls: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class of transformers behind a pruned one; a stock class is its own."""
    native: type[PreTrainedModel] = getattr(transformers, cls.__name__, cls)
    return native


def parse_dtype(name: str) -> torch.dtype | str:
    """Reads a ``--dtype`` value: "auto", "float32", "bfloat16", "float16", "float64"."""
    return "auto" if name == "auto" else getattr(torch, name)


def refuse_pickles(model: str | Path) -> None:
    """Refuses a folder whose weights are pickles only.

    Raises:
        CheckpointError: If there are pickles and no safetensors, or no weights at all.
    """
    path = Path(model)
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"'{model}' holds its weights as a pickle only ({pickles[0]}), which can run code when "
            "it is read. Convert it once where you trust it: "
            "AutoModel.from_pretrained(folder).save_pretrained(new_folder) writes safetensors."
        )
    raise CheckpointError(f"'{model}' has a config.json but no *.safetensors weights beside it.")


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
