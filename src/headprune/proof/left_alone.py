"""Whatever an edit leaves alone is that of the source: settings, and the files beside the weights.

No probe reaches all of it: a window is wider than a proof's texts, and images have their own tower.
"""

from __future__ import annotations

import filecmp
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from headprune.errors import ProofError
from headprune.io.folders import COMPANIONS
from headprune.io.parsing import read_json
from headprune.model.attention import family_of
from headprune.model.config_file import CONFIG, as_json, read_as, with_older_rope
from headprune.surgery.layer_windows import SETTINGS

GENERATION = "generation_config.json"
Json = dict[str, Any]

# settings of an edit; their values are those of the config in memory
_ANYWHERE = {"dtype", "torch_dtype", "tie_word_embeddings"}
_NAMED = {
    *("headprune", "pruned_heads", "per_layer_config", "allow_global_per_layer_attribute_access"),
    *("head_dim", "auto_map", "architectures", "transformers_weights"),
}
# named by the writer, and older names that Phi-3 keeps beside the newer ones
_OF_WRITING = {"auto_map", "architectures", "partial_rotary_factor", "type"}


def refuse_other_settings(
    source: Path, before: PreTrainedConfig, after: PreTrainedConfig, folder: Path
) -> None:
    """Refuse a config.json with a setting that neither the source nor the edit has.

    Args:
        source: The folder of the source.
        before: Its config.
        after: Its config after the edit.
        folder: The result.

    Raises:
        ProofError: Naming the first such setting.
    """
    found = read_json(folder / CONFIG)
    read, wanted = as_json(read_as(after, found)), as_json(after)
    others = [n for n in _others(wanted, read, set()) if n.rpartition(".")[2] not in _OF_WRITING]
    if type(before) is type(after):
        kept = with_older_rope(read_json(source / CONFIG), before)
        edited = _NAMED | _ANYWHERE | _heads(before)
        if before.to_dict().get("layer_types") != wanted.get("layer_types"):
            edited |= {*SETTINGS}
        others += _others(kept, found, edited)
    if others:
        raise ProofError(
            f"The proof failed: '{others[0]}' in config.json is neither the original's nor set by "
            "the edit. Please report this model and plan."
        )


def _heads(config: PreTrainedConfig) -> set[str]:
    """Return the names of the numbers of heads."""
    family = family_of(config)
    names = {family.query_heads_key, family.kv_heads_key} - {None}
    return {*map(str, names), *(a for a, name in config.attribute_map.items() if name in names)}


def _others(wanted: Json, found: Json, named: set[str]) -> Iterator[str]:
    """Yield settings that differ, "part.setting" for those of a part."""
    for name in sorted((wanted.keys() | found.keys()) - named):
        one, two = wanted.get(name), found.get(name)
        if isinstance(one, dict) and isinstance(two, dict):
            yield from (f"{name}.{inner}" for inner in _others(one, two, named & _ANYWHERE))
        elif one != two:
            yield name


def refuse_other_files(source: Path, folder: Path) -> None:
    """Refuse files of tokenizer, processor and generation that are not the source's.

    Raises:
        ProofError: Naming the first such file.
    """
    files = {file for pattern in COMPANIONS for file in source.glob(pattern) if file.is_file()}
    for file in sorted(files):
        copied = folder / file.relative_to(source)
        if not (copied.is_file() and _same_file(file, copied)):
            raise ProofError(
                f"The proof failed: '{file.relative_to(source)}' of the result is not the "
                "original's. Check the disk; if it is sound, please report this model."
            )


def _same_file(file: Path, copied: Path) -> bool:
    if file.name != GENERATION:
        return filecmp.cmp(file, copied, shallow=False)
    settings = [{**read_json(each), "alignment_heads": None} for each in (file, copied)]
    return settings[0] == settings[1]
