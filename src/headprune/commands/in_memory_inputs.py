"""Models and data that a Python user holds: commands read them from files in a temporary folder."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from headprune.errors import HeadpruneError

_MODELS = ("model", "against", "teacher")
_DATA = ("data", "calibrate", "refit")


@contextmanager
def as_files(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of a call, with paths in place of models and data.

    Models are ``PreTrainedModel``, alone or in a pair with their tokenizer. Data are
    ``datasets.Dataset``, also in lists and mappings. A plan may be a mapping, a dtype one of torch.
    """
    with ExitStack() as stack:

        @cache
        def folder() -> Path:
            return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headprune-")))

        yield {name: _place(name, value, folder) for name, value in given.items()}


@contextmanager
def bars_hidden() -> Iterator[None]:
    """Hide the progress bars of transformers, as a context shows the progress; not of downloads."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from transformers.utils import logging

    shown, downloads = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    logging.disable_progress_bar()
    if downloads:
        enable_progress_bars()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
            if not downloads:
                disable_progress_bars()


def _place(name: str, value: Any, folder: Callable[[], Path]) -> Any:
    if name in _MODELS:
        net, tokenizer = value if isinstance(value, tuple) else (value, None)
        return _model(net, tokenizer, folder() / name) if hasattr(net, "state_dict") else value
    if name in _DATA:
        return _each(value, lambda one, at: _dataset(one, lambda: folder() / f"{name}{at}.parquet"))
    if name == "plan" and isinstance(value, Mapping):
        plan = {path: list(heads) for path, heads in value.items()}
        (file := folder() / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        return file
    if name.endswith("dtype") and type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    return value


def _model(net: Any, tokenizer: Any, folder: Path) -> Path:
    """Write a model with its tokenizer.

    Raises:
        HeadpruneError: If it is none of transformers, lacks weights, computes them, or cannot be
            written.
    """
    from transformers import AutoTokenizer

    from headprune.io.folders import OF_SENTENCES, copy_companions, refuse_links, source_folder
    from headprune.model.reading import damage_is

    net = _unwrapped(net)
    name = net.config.name_or_path
    folder /= Path(name).name or type(net).__name__
    advice = "Write it yourself (save_pretrained), and give the folder"
    refused = damage_is(lambda why: f"The {type(net).__name__} in memory: {why} {advice}.")
    with bars_hidden(), refused, _without_generation(net) as generation:
        net.save_pretrained(folder, state_dict=_weights(net))
        if generation is not None:  # a folder may hold settings that transformers does not write
            generation.to_json_file(folder / "generation_config.json")
    if name:
        refuse_links(name)
        with suppress(Exception):  # a model without text has none
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(name)
        with suppress(Exception):  # nor is every name a place
            if net.get_output_embeddings() is None:
                copy_companions(source_folder(name), folder, OF_SENTENCES)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def _unwrapped(net: Any) -> Any:
    """Return the model in wrappers of torch: of ``compile``, and for several processes."""
    from torch.nn.utils.parametrize import is_parametrized
    from transformers import PreTrainedModel

    while not isinstance(net, PreTrainedModel) and {"_orig_mod", "module"} & {*net._modules}:
        net = net._modules.get("_orig_mod", net._modules.get("module"))
    if any(type(module).__module__.split(".")[0] == "peft" for module in net.modules()):
        raise HeadpruneError(
            f"The {type(net).__name__} holds adapters of peft. Give the model that its "
            "merge_and_unload() returns."
        )
    if not isinstance(net, PreTrainedModel):
        raise HeadpruneError(
            f"A {type(net).__name__} is no model of transformers (PreTrainedModel). Give one, or "
            "the folder of one."
        )
    for name, module in net.named_modules():
        homes = [type(hook).__module__ for hook in module._forward_pre_hooks.values()]
        # the hooks are those of the older norms, and of masks
        if is_parametrized(module) or any(home.startswith("torch.nn.utils.") for home in homes):
            raise HeadpruneError(
                f"'{name}' of the {type(net).__name__} computes its weights from others (a "
                "parametrization, a norm or a mask of torch). Put the result into the module, as "
                "remove_parametrizations does, and give the model again."
            )
    return net


@contextmanager
def _without_generation(net: Any) -> Iterator[Any]:
    """Take the settings of generation from a model in a ``with`` block; None where it has none."""
    generation = getattr(net, "generation_config", None)
    if generation is not None:
        net.generation_config = type(generation)()
    try:
        yield generation
    finally:
        if generation is not None:
            net.generation_config = generation


def _weights(net: Any) -> dict[str, Any]:
    """Return the tensors of a model; copies where several share memory and are not tied.

    Raises:
        HeadpruneError: If some have no numbers, or too few bits.
    """
    from accelerate.utils.modeling import get_state_dict_offloaded_model

    state: dict[str, Any] = net.state_dict()
    owners = dict[int, str]()
    if any(hasattr(module, "_hf_hook") for module in net.modules()):
        state |= get_state_dict_offloaded_model(net)
    for name, tensor in state.items():
        if tensor.is_meta:
            raise HeadpruneError(
                f"'{name}' of the {type(net).__name__} is on the meta device, without numbers. "
                "Load its weights first."
            )
        if tensor.is_floating_point() and tensor.dtype.itemsize < 2:
            raise HeadpruneError(
                f"'{name}' of the {type(net).__name__} is quantised ({tensor.dtype}). Give the "
                "unquantised model that it was made from, and quantise the result."
            )
        owner = owners.setdefault(tensor.untyped_storage().data_ptr(), name)
        if owner != name and name not in net.all_tied_weights_keys:
            state[name] = tensor.clone()
    return state


def _each(value: Any, write: Callable[[Any, int], Any]) -> Any:
    if isinstance(value, Mapping) and hasattr(value, "column_names"):  # a DatasetDict
        raise HeadpruneError(
            f"The data set has the splits {', '.join(map(str, value))}: give one of them, as in "
            f"data['{[*value][-1]}']."
        )
    if isinstance(value, Mapping):
        return {name: write(one, number) for number, (name, one) in enumerate(value.items())}
    if isinstance(value, list | tuple):
        return [write(one, number) for number, one in enumerate(value)]
    return write(value, 0)


def _dataset(value: Any, file: Callable[[], Path]) -> Any:
    if not (hasattr(value, "to_parquet") and hasattr(value, "features")):
        return value
    value.to_parquet(path := file())
    return path
