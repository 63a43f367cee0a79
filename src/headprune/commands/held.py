"""Models and data that a Python user holds: commands read them from files in a temporary folder."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

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
        return _model(net, tokenizer, folder() / name) if _is_model(net) else value
    if name in _DATA:
        return _each(value, lambda one, at: _dataset(one, lambda: folder() / f"{name}{at}.parquet"))
    if name == "plan" and isinstance(value, Mapping):
        plan = {path: list(heads) for path, heads in value.items()}
        (file := folder() / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        return file
    if name.endswith("dtype") and type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    return value


def _is_model(value: Any) -> bool:
    return hasattr(value, "save_pretrained") and hasattr(value, "config")


def _model(net: Any, tokenizer: Any, folder: Path) -> Path:
    from transformers import AutoTokenizer

    from headprune.io.folders import refuse_links

    name = net.config.name_or_path
    folder /= Path(name).name or type(net).__name__
    with bars_hidden():
        net.save_pretrained(folder)
    if tokenizer is None and name:
        refuse_links(name)
        with suppress(Exception):  # a model without text has none
            tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def _each(value: Any, write: Callable[[Any, int], Any]) -> Any:
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
