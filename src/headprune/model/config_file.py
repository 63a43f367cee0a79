"""The config.json of a result: that of its source with the changes of the edit, for any reader.

transformers' own writer drops the names that other readers know: it writes ``rope_parameters``, and
transformers 4 and many engines take 10,000 and no scaling where ``rope_theta`` is missing.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from headprune.io.parsing import parse_json, read_json

Json = dict[str, Any]

CONFIG = "config.json"
_PASSES = 3  # one setting may follow from another: head_dim from the number of heads
_DTYPE = {"dtype": "torch_dtype"}
# the older names of theta: of all layers or full attention, then of sliding attention
_THETAS = (
    *(("rope_theta", "rope_local_base_freq"), ("global_rope_theta", "local_rope_theta")),
    ("rope_theta", None),
)
_FLAT = (("rope_theta", "partial_rotary_factor"), ("rotary_emb_base", "rotary_pct"))


def write_config(config: PreTrainedConfig, folder: Path, source: Path | None) -> None:
    """Write config.json; beside a model's own code, which transformers has named in the config.

    Args:
        config: The settings.
        folder: The folder.
        source: The config.json of the same class that they are an edit of; None without one.
    """
    content = with_older_rope(as_json(config), config)
    if source is not None:
        content = edited(read_json(source), config)
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def edited(source: Json, config: PreTrainedConfig) -> Json:
    """Return the config.json of a source with the settings of another config of its class.

    Args:
        source: The content of the source's config.json.
        config: The settings.
    """
    wanted, content = as_json(config), copy.deepcopy(source)
    for _ in range(_PASSES):
        try:
            now = as_json(read_as(config, content))
        except Exception:  # a class refuses settings in its own way
            break
        if now == wanted:
            return with_older_rope(content, config)
        content = _changed(content, now, wanted, config)
    return with_older_rope(wanted, config)


def as_json(config: PreTrainedConfig) -> Json:
    """Return the settings of a config as transformers writes them."""
    content: Json = parse_json(config.to_json_string(), infinite=True)
    return content


def read_as(config: PreTrainedConfig, content: Json) -> PreTrainedConfig:
    """Return the config of a file's content, of the class of another config."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)  # loading has said it once
    try:
        read: PreTrainedConfig = type(config).from_dict(copy.deepcopy(content))
    finally:
        logger.setLevel(level)
    return read


def _changed(content: Json, now: Json, wanted: Json, config: PreTrainedConfig) -> Json:
    """Return a config.json with the differences between two serialisations of it."""
    aliases = {**_DTYPE, **{name: alias for alias, name in config.attribute_map.items()}}
    names = {name for name in now.keys() | wanted.keys() if _differs(name, now, wanted)}
    if "head_dim" in wanted:  # else it follows from the number of heads
        names.add("head_dim")
    changed = dict(content)
    for name in names:
        part = vars(config).get(name)
        written = [n for n in (name, aliases.get(name)) if n in content] or [name]
        for key in written:
            if name not in wanted:
                changed.pop(key, None)
            elif isinstance(part, PreTrainedConfig) and isinstance(content.get(key), dict):
                old = now.get(name) or {}
                changed[key] = _changed(content[key], old, wanted[name], part)
            else:
                changed[key] = wanted[name]
    return changed


def _differs(name: str, one: Json, two: Json) -> bool:
    return name not in one or name not in two or one[name] != two[name]


def with_older_rope(content: Json, config: PreTrainedConfig) -> Json:
    """Return a config.json with its rotary embedding in the names of transformers 4 as well.

    Settings that those names do not express stay as they are: the class reads them back, and a
    spelling counts if it reads the same.

    Args:
        content: The content of config.json.
        config: The config that it describes.
    """
    content = dict(content)
    for name, part in vars(config).items():
        if isinstance(part, PreTrainedConfig) and isinstance(content.get(name), dict):
            content[name] = with_older_rope(content[name], part)
    parameters = content.get("rope_parameters")
    if not isinstance(parameters, dict) or not parameters:
        return content
    plain = {name: value for name, value in content.items() if name != "rope_parameters"}
    for older in _older(parameters, getattr(config, "default_rope_type", "default")):
        if _reads_same({**plain, **older}, older, config) and _reads_same(
            {**content, **older}, older, config
        ):
            return {**older, **content}
    return content


def _older(parameters: Json, usual: str) -> Iterator[Json]:
    """Yield settings of a rotary embedding in older names, which do not say the usual type."""
    full = parameters.get("full_attention")
    if not isinstance(full, dict):
        for theta, share in _FLAT:
            yield from _flat(parameters, usual, theta, share)
        return
    sliding = parameters.get("sliding_attention") or {}
    for theta, local in _THETAS:
        for older in _flat(full, usual, theta, "partial_rotary_factor"):
            yield older if local is None else {**older, local: sliding.get("rope_theta")}


def _flat(parameters: Json, usual: str, theta: str, share: str) -> Iterator[Json]:
    older = {
        theta: parameters.get("rope_theta"),
        share: parameters.get("partial_rotary_factor"),
    }
    older = {name: value for name, value in older.items() if value is not None}
    apart = ("rope_theta", "partial_rotary_factor", "rope_type")
    scaling = {name: value for name, value in parameters.items() if name not in apart}
    kind = parameters.get("rope_type", "default")
    if kind == "longrope":  # Phi-3 refuses any further entry
        factors = {name: scaling.get(name) for name in ("short_factor", "long_factor")}
        yield {**older, "rope_scaling": {"type": kind, **factors}}
    if scaling or kind not in ("default", usual):
        older["rope_scaling"] = {"rope_type": kind, **scaling}
    yield older


def _reads_same(content: Json, older: Json, config: PreTrainedConfig) -> bool:
    """Return whether a class takes these names, and reads the rotary embedding of a config."""
    try:
        read = read_as(config, content)
    except Exception:  # a class refuses settings in its own way
        return False
    unread = vars(read).keys() & {name for names in (*_THETAS, *_FLAT) for name in names}
    if unread & older.keys() - {"partial_rotary_factor"}:  # which Phi-3 keeps
        return False
    return _kinds(read.rope_parameters) == _kinds(config.rope_parameters)


def _kinds(parameters: Mapping[str, Any] | None) -> Json:
    """Return the settings of a rotary embedding; "type" is another name of "rope_type"."""
    return {
        name: _kinds(value) if isinstance(value, dict) else value
        for name, value in (parameters or {}).items()
        if name != "type"
    }
