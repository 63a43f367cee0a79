"""Loading models, configs and tokenizers by folder or hub id."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
from pydantic import Field, TypeAdapter, ValidationError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from headprune.errors import CheckpointError
from headprune.io import hub
from headprune.io.folders import refuse_links
from headprune.io.parsing import refuse_pointer
from headprune.io.shards import StoredTensor
from headprune.io.writing import refuse_strange_name
from headprune.model.attention import attention_of, family_of, restore_ids
from headprune.model.batch import CLASSIFIERS as CLASSIFIERS
from headprune.model.batch import WITHOUT_LOSS as WITHOUT_LOSS
from headprune.model.batch import Task as Task
from headprune.model.batch import auto_class_of as auto_class_of
from headprune.model.batch import class_ids as class_ids
from headprune.model.batch import is_remote
from headprune.model.batch import native_class as native_class
from headprune.model.batch import task_of as task_of
from headprune.model.reading import (
    damage_is,
    needs_package,
    read_config_file,
    read_record,
    refuse_damaged_json,
)
from headprune.model.recognition import named_class, row_of
from headprune.model.refusals import (
    checked_description,
    conversion,
    quantised_by,
    refuse_adapter,
    refuse_pickles,
    refuse_pickles_among,
    refuse_unexpected,
)
from headprune.model.skeleton import Unmapped, built, widening, without_weights
from headprune.model.stored import stored_tensors, weight_files
from headprune.registry import did_you_mean
from headprune.runtime import modeling_headprune
from headprune.schemas.plan import Number
from headprune.tensors.dtypes import SAFETENSORS


def from_pretrained(model: str | Path, **kwargs: Any) -> Any:
    """Load a model as the class its config names; results of headprune included.

    Args:
        model: A folder or a hub id.
        **kwargs: As for ``AutoModel.from_pretrained``, for instance ``dtype``, ``device_map``,
            ``attn_implementation``. ``auto_class="AutoModelForSequenceClassification"`` loads
            another head than the one in the config; ``drop_unexpected=True`` leaves out tensors
            that the class does not take; ``weights=False`` builds the model on the meta device
            from the headers of its files, where names allow it.

    Returns:
        The model in eval mode; with ``output_loading_info=True`` the loading info beside it.

    Raises:
        CheckpointError: If there are no safetensors, tensors are missing, or some would be lost.
    """
    auto_class, dropping = kwargs.pop("auto_class", None), kwargs.pop("drop_unexpected", False)
    wants_info, weights = kwargs.pop("output_loading_info", False), kwargs.pop("weights", True)
    if "torch_dtype" in kwargs:
        kwargs.setdefault("dtype", kwargs.pop("torch_dtype"))
    if not kwargs.pop("use_safetensors", True):
        raise CheckpointError("headprune reads safetensors only; leave out use_safetensors=False.")
    refuse_links(model)
    config = kwargs.pop("config", None)
    if config is None:
        config = load_config(model, **{name: kwargs[name] for name in _HUB if name in kwargs})
        for name in set(kwargs) - {*_HUB, "dtype", "attn_implementation"}:
            if hasattr(config, name):  # a setting, as for AutoModel
                setattr(config, name, kwargs.pop(name))
    where = {name: kwargs[name] for name in _PLACE if name in kwargs}
    if "variant" not in kwargs:
        refuse_absent_weights(model, **where)
    tensors = {} if "variant" in kwargs else stored_tensors(model, **where)
    net, info = assemble(model, config, tensors, auto_class, dropping, weights, **kwargs)
    return (net, info) if wants_info else net


def assemble(
    model: str | Path,
    config: PreTrainedConfig,
    tensors: Mapping[str, StoredTensor],
    auto_class: str | None = None,
    dropping: bool = False,
    weights: bool | None = True,
    **kwargs: Any,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Build a model from its config and the headers of its files.

    Args:
        model: A folder or a hub id.
        config: Its config.
        tensors: The tensors of its files; empty if they are not read by their headers.
        auto_class: The Auto class of another head than the one in the config.
        dropping: Leave out tensors that the class does not take.
        weights: Read the weights. False: the model is on the meta device, where names allow it.
            None: it must be.
        **kwargs: As for ``AutoModel.from_pretrained``.

    Returns:
        The model in eval mode, and the loading info of transformers.

    Raises:
        CheckpointError: If it does not load, lacks tensors, or would lose some.
        Unmapped: If it must be on the meta device, and its tensors have other names on disk.
    """
    folder = Path(model) / kwargs.get("subfolder", "")
    refuse_damaged_json(folder, "generation_config.json")
    record = read_record(folder)
    native = native_of(config, auto_class)
    if has_pruned_heads(config):
        _describe_pruned_heads(config, native)
    cls = native
    if getattr(config, "headprune", None) is not None:
        config.headprune = checked_description(model, config, record)
        cls = modeling_headprune.pruned_class(native)
    options = {"dtype": "auto", **kwargs, "use_safetensors": True, "output_loading_info": True}
    refused = damage_is(lambda why: _does_not_load(model, config, cls, why))
    with refused, hub.asked_once(model), uneven_heads_are_known():
        net, info = _loaded(cls, model, config, options, tensors, weights)
    # another head than the checkpoint's starts anew, and many encoders come without a pooler
    missing = sorted(name for name in info["missing_keys"] if "pooler" not in name)
    if missing and auto_class is None and "ignore_mismatched_sizes" not in kwargs:
        advice = "The folder is incomplete or damaged; get it again."
        named = (config.architectures or [native.__name__])[0]
        if named not in (native.__name__, cls.__name__):
            advice = f"It was saved as a {named}; save the whole model that it is a part of."
        raise CheckpointError(
            f"'{model}' lacks {len(missing)} of the tensors of a {cls.__name__}, '{missing[0]}' "
            f"the first. {advice}"
        )
    # asking for another head means to leave the present one out
    if auto_class is None and not dropping:
        refuse_unexpected(model, net, info["unexpected_keys"])
    believe_tensors(net, net.config)
    if record is not None and (row := row_of(config)) is not None:
        restore_ids(net, record.layout, row.for_runtime())
    return net.eval(), info


def believe_tensors(net: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Have a config say that the embeddings are not tied, where the loaded tensors are not.

    Other readers, and models built from the config, would leave out the output embedding.
    """
    # several parts hang on the flag in T5 or BERT: the others stay tied
    if net._tied_weights_keys and not net.all_tied_weights_keys:
        for part in (config, config.get_text_config(decoder=True)):
            if getattr(part, "tie_word_embeddings", False):
                part.tie_word_embeddings = False


def _loaded(
    cls: type[PreTrainedModel],
    model: str | Path,
    config: PreTrainedConfig,
    options: dict[str, Any],
    tensors: Mapping[str, StoredTensor],
    weights: bool | None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    if tensors and not weights:
        with suppress(*([] if weights is None else [Unmapped])):
            return built(cls, model, copy.deepcopy(config), tensors, options, row_of(config))
    if _widens(options, tensors):
        return widening(cls, model, config, tensors, options)
    net, info = cls.from_pretrained(str(model), config=config, **options)
    return net, info


def _widens(options: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> bool:
    """Return whether all weights become a wider type, and no option says how files are read."""
    plain = {"dtype", "attn_implementation", "use_safetensors", "output_loading_info", *_HUB}
    if not set(options) <= plain or options.get("trust_remote_code"):  # it may bring a generate()
        return False
    dtype, held = options["dtype"], {SAFETENSORS.get(tensor.dtype) for tensor in tensors.values()}
    return dtype in _WIDE and bool(held) and held <= _WIDE[dtype]


def refuse_absent_weights(model: str | Path, **where: Any) -> None:
    """Refuse a folder without safetensors, and an incomplete hub model that cannot be fetched.

    Raises:
        CheckpointError: With the missing file, or the pickle that is there.
    """
    refuse_pickles(Path(model) / where.get("subfolder", ""))
    files = weight_files(model, **where) or {"the weights": None}
    lacking = next((name for name, file in files.items() if file is None), None)
    offline = hub.why_not() if lacking and hub.may_be_id(model) else None
    if offline:
        raise CheckpointError(
            f"The cache of the hub lacks {lacking} of '{model}', and the hub cannot be asked "
            f"({offline}). Get it with a network: hf download {model}"
        )


def _does_not_load(model: str | Path, config: PreTrainedConfig, cls: type, why: str) -> str:
    if hub.may_be_id(model) and "file named model.safetensors" in why:
        return (
            f"'{model}' has no safetensors on the hub. If it has a pickle, run in Python in its "
            f"downloaded folder: {conversion('pytorch_model.bin')}"
        )
    method = quantised_by(config)
    if method is not None:  # mostly for want of the package that reads it
        return (
            f"'{model}' is quantised ({method}) and does not load: {why.rstrip('.')}. Install what "
            "that names, or give the unquantised model that it was made from."
        )
    if "ignore_mismatched_sizes" in why:
        why = "some of its tensors have other shapes than its config describes"
    return needs_package(model, why) or (
        f"'{model}' does not load as {cls.__name__}: {why.rstrip('.')}. The folder is incomplete "
        "or damaged; get it again."
    )


_HALF = {torch.bfloat16, torch.float16}
_WIDE = {torch.float32: _HALF, torch.float64: {*_HALF, torch.float32}}  # the types they widen

# arguments about the place of files, and about the hub
_PLACE = ("revision", "cache_dir", "subfolder")
_HUB = (
    *("code_revision", "trust_remote_code", "token", *_PLACE),
    *("local_files_only", "force_download", "proxies"),
)


def load_config(model: str | Path, **kwargs: Any) -> PreTrainedConfig:
    """Read a model's config; code that comes with it runs only with ``trust_remote_code``.

    Raises:
        CheckpointError: If there is no such folder or hub id, or its config cannot be read.
    """
    refuse_links(model)
    path = Path(model) / kwargs.get("subfolder", "")
    refuse_strange_name(path)
    where = {name: kwargs[name] for name in (*_PLACE, "token") if name in kwargs}
    refuse_adapter(model, ask=not kwargs.get("local_files_only"), **where)
    if path.is_dir() and not (path / "config.json").is_file():
        raise CheckpointError(
            f"'{model}' has no config.json, so it is no model folder. Give the folder that "
            "save_pretrained wrote, or a hub id."
        )
    refuse_no_model(model, path)
    if path.is_dir():
        read_config_file(path / "config.json")
    refused = damage_is(lambda why: f"'{model}': {_unread(path, why)}")
    with refused, hub.asked_once(model), uneven_heads_are_known():
        config = AutoConfig.from_pretrained(str(model), **{"trust_remote_code": False, **kwargs})
        if is_remote(type(config)):
            register_remote(config, str(model))
        for part in (config, config.get_text_config()):
            if hasattr(part, "num_hidden_layers"):
                list(getattr(part, "per_layer_config", None) or ())  # each is checked when made
            types = getattr(part, "layer_types", None) or ()
            if "sliding_attention" in types and not getattr(part, "sliding_window", None):
                raise CheckpointError(
                    f"layer_types in the config of '{model}' names layers with a window, and "
                    "sliding_window no size (or use_sliding_window is false): correct one of them."
                )
        return config


def refuse_no_model(model: str | Path, path: Path | None = None) -> None:
    """Refuse a name that is neither a folder nor a hub id.

    Raises:
        CheckpointError: Naming it.
    """
    path = path or Path(model)
    if path.is_file():
        refuse_pickles_among([path])
        raise CheckpointError(f"'{model}' is a file. Give a model folder, or a hub id.")
    hub.refuse_no_id(model)


def _unread(path: Path, why: str) -> str:
    if path.is_dir():
        return f"could not read its config. {why}"
    if why_not := hub.why_not():
        return hub.uncached(why_not)
    return f"could not find a folder or hub model of that name. {why}"


@contextmanager
def uneven_heads_are_known() -> Iterator[None]:
    """Silence the warning that layers differ from the global config, which is that of before."""
    logger = logging.getLogger("transformers.integrations.heterogeneity.configuration_utils")

    def passes(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Reading global config value")

    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


def load_tokenizer(model: str | Path, config: PreTrainedConfig | None = None, **kwargs: Any) -> Any:
    """Load the tokenizer beside a model.

    Args:
        model: Folder or hub id.
        config: Its config; None to read it.
        **kwargs: As for ``AutoTokenizer.from_pretrained``.

    Raises:
        CheckpointError: If there is none, or one without a vocabulary: without its files,
            transformers makes a tokenizer of special tokens alone for many families.
    """
    config = config or load_config(model, **kwargs)
    for file in (*Path(model).glob("tokenizer*.json"), *Path(model).glob("*.model")):
        refuse_pointer(file)
    refuse_damaged_json(Path(model), "tokenizer_config.json", "special_tokens_map.json")
    why_not = (
        f"'{model}' has no usable tokenizer, and text data needs one. Copy the tokenizer files of "
        "the original model into the folder."
    )
    refused = damage_is(lambda why: f"{why_not} {why}")
    with refused, hub.asked_once(model):
        tokenizer = AutoTokenizer.from_pretrained(str(model), config=config, **kwargs)
        tokenizer("a", verbose=False)  # some settings are read here first
        added = {token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
        ordinary = sum(token not in added for token in tokenizer.get_vocab())
    vocabulary = getattr(config.get_text_config(), "vocab_size", 0)
    # one is a word boundary; a tokenizer of added tokens alone covers its model
    if ordinary <= 1 and 2 * len(tokenizer) < vocabulary:
        raise CheckpointError(why_not)
    return tokenizer


def load_extractor(auto: Any, model: str | Path, **kwargs: Any) -> Any:
    """Load what makes inputs of images or sound, by ``AutoImageProcessor`` or its like.

    Raises:
        CheckpointError: If there is none.
    """
    refused = damage_is(lambda why: f"'{model}' has no usable preprocessor_config.json: {why}")
    with refused, hub.asked_once(model):
        return auto.from_pretrained(str(model), **kwargs)


def vocabulary_of(model: PreTrainedModel) -> int:
    """Return the number of tokens that a model of text has embeddings for."""
    return int(model.get_input_embeddings().weight.shape[0])


def register_remote(config: PreTrainedConfig, model: str) -> None:
    """Make the Auto classes know the classes that come as code with a model."""
    for auto, reference in (getattr(config, "auto_map", None) or {}).items():
        if auto.startswith("AutoModel") and not reference.startswith(modeling_headprune.MODULE):
            cls = get_class_from_dynamic_module(reference, model)
            getattr(transformers, auto).register(type(config), cls, exist_ok=True)


def remote_code(config: PreTrainedConfig) -> list[Path]:
    """Return the files of code that came with a model."""
    classes = (type(config), *modeling_headprune.auto_classes(type(config)).values())
    folders = {Path(inspect.getfile(cls)).parent for cls in classes if is_remote(cls)}
    files = {file.name: file for folder in folders for file in folder.glob("*.py")}
    return [file for name, file in files.items() if name != "__init__.py"]


def native_of(config: PreTrainedConfig, auto_class: str | None = None) -> type[PreTrainedModel]:
    """Return the class of transformers that a config names, or that of an Auto class.

    Raises:
        CheckpointError: If there is none.
    """
    if auto_class is not None and not hasattr(transformers, auto_class):
        known = [name for name in dir(transformers) if name.startswith("AutoModel")]
        raise CheckpointError(
            f"transformers has no class '{auto_class}'.{did_you_mean(auto_class, known)}"
        )
    native: Any = named_class(config)
    if auto_class is not None or native is None:
        mapping = getattr(transformers, auto_class or "AutoModel")._model_mapping
        if type(config) not in mapping:
            raise CheckpointError(
                f"transformers has no {auto_class or 'AutoModel'} for model type "
                f"'{config.model_type}'."
            )
        native = mapping[type(config)]
    chosen: type[PreTrainedModel] = native[0] if isinstance(native, tuple) else native
    return chosen


def parse_dtype(name: str) -> torch.dtype | str:
    """Return the type of a ``dtype`` value: "auto", "float32", "bfloat16" and so on."""
    return "auto" if name == "auto" else getattr(torch, name)


# layers are names in JSON
_PRUNED = TypeAdapter(dict[Annotated[int, Field(ge=0)], list[Number]])


def has_pruned_heads(config: PreTrainedConfig) -> bool:
    """Return whether ``prune_heads`` of transformers 4 removed heads.

    It wrote ``"pruned_heads": {"0": [1, 4]}``, which transformers 5 ignores.
    """
    pruned = getattr(config, "pruned_heads", None) or {}
    return any(pruned.values()) if isinstance(pruned, dict) else True


def _describe_pruned_heads(config: PreTrainedConfig, native: type[PreTrainedModel]) -> None:
    """Give such a config the description that the runtime rebuilds models from, in place."""
    try:
        pruned = _PRUNED.validate_python(config.pruned_heads)
    except ValidationError:
        raise CheckpointError(
            f"config.json has pruned_heads={config.pruned_heads!r}, which is no map from layer "
            'numbers to lists of heads, such as {"0": [1, 4]}.'
        ) from None
    family = family_of(config)
    del config.pruned_heads
    attentions = attention_of(without_weights(native, config))
    layout: dict[str, Any] = {}
    for layer, attention in enumerate(attentions):
        gone = set(pruned.pop(layer, ()))
        if gone - set(attention.query_ids):
            raise CheckpointError(
                f"config.json says that head {max(gone)} of layer {layer} was pruned, but it had "
                f"{attention.query_heads} heads."
            )
        left = [head for head in attention.query_ids if head not in gone]
        layout[attention.path] = {"query_heads": left, "kv_heads": left}
    if pruned:
        raise CheckpointError(
            f"config.json says that heads of layer {min(pruned)} were pruned, but the model has "
            f"{len(attentions)} attention modules."
        )
    schema = modeling_headprune.SCHEMA
    config.headprune = {"schema_version": schema, "family": family.for_runtime(), "layout": layout}
