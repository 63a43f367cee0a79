"""A model folder, written from weights read piece by piece."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from headprune.formats.source import ExportSource
from headprune.formats.weights import WithFused
from headprune.io.folders import copy_companions
from headprune.io.parsing import read_json
from headprune.model.config_file import CONFIG, with_older_rope, write_config
from headprune.model.loading import uneven_heads_are_known
from headprune.runtime import RUNTIME, modeling_headprune

OnStep = Callable[..., None]
"""Called with the amount written and the total."""
_SHARD = 2**30  # bytes, and so about the memory that writing takes


def write_checkpoint(source: ExportSource, folder: Path, on_step: OnStep) -> None:
    """Writes config, weights, tokenizer and, where the config names it, the runtime."""
    with uneven_heads_are_known():
        source.config.save_pretrained(folder)
        write_config(source.config, folder, source.folder / CONFIG)
    if getattr(source.config, "headprune", None) is not None:
        shutil.copyfile(modeling_headprune.__file__, folder / RUNTIME)
    copy_companions(source.folder, folder)
    weights = WithFused(source.weights, source.folder, source.net)
    write_weights(replace(source, weights=weights), folder, on_step)


def write_facts(source: ExportSource, folder: Path) -> None:
    """Write config and tokenizer beside the files of an engine."""
    with uneven_heads_are_known():
        config = with_older_rope(read_json(source.folder / CONFIG), source.config)
    config.pop("auto_map", None)  # names code that stays behind
    text = json.dumps({**config, "dtype": "float32"}, indent=2, sort_keys=True)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
    copy_companions(source.folder, folder)


def write_weights(source: ExportSource, folder: Path, on_step: OnStep) -> None:
    """Writes the weights, a shard at a time."""
    shards: list[dict[str, int]] = [{}]
    for name in source.weights:
        size = source.weights.bytes(name)
        if shards[-1] and sum(shards[-1].values()) + size > _SHARD:
            shards.append({})
        shards[-1][name] = size
    total = sum(sum(shard.values()) for shard in shards)
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        file = file if len(shards) > 1 else SAFE_WEIGHTS_NAME
        tensors = {name: source.weights[name].contiguous() for name in shard}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
        on_step(number, len(shards))
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        text = json.dumps(index, indent=2) + "\n"
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")
