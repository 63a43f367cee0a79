"""A model folder, written from weights read piece by piece."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from headprune.formats.source import ExportSource
from headprune.io.folders import copy_companions
from headprune.io.parsing import read_json
from headprune.io.shards import write_shards
from headprune.model.config_file import CONFIG, with_older_rope, write_config
from headprune.model.loading import remote_code, uneven_heads_are_known
from headprune.runtime import RUNTIME, modeling_headprune

OnStep = Callable[..., None]
"""Called with the amount written and the total."""


def write_checkpoint(source: ExportSource, folder: Path, on_step: OnStep) -> None:
    """Writes config, weights, tokenizer and, where the config names it, the runtime."""
    with uneven_heads_are_known():
        source.config.save_pretrained(folder)
        write_config(source.config, folder, source.folder / CONFIG)
    if getattr(source.config, "headprune", None) is not None:
        shutil.copyfile(modeling_headprune.__file__, folder / RUNTIME)
    for file in remote_code(source.config):
        shutil.copyfile(file, folder / file.name)
    copy_companions(source.folder, folder)
    pieces, _ = source.on_disk()
    write_shards(pieces, folder, source.net.num_parameters(), on_tensor=on_step)


def write_facts(source: ExportSource, folder: Path) -> None:
    """Write config and tokenizer beside the files of an engine."""
    with uneven_heads_are_known():
        config = with_older_rope(read_json(source.folder / CONFIG), source.config)
    config.pop("auto_map", None)  # names code that stays behind
    text = json.dumps({**config, "dtype": "float32"}, indent=2, sort_keys=True)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
    copy_companions(source.folder, folder)
