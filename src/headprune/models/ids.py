"""Ids of heads stay those of the original model, also where a plain config cannot say them."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PreTrainedModel

from headprune.runtime import MANIFEST
from headprune.runtime.modeling_headprune import Attention


def restore_ids(net: PreTrainedModel, folder: Path) -> None:
    """Tells a model what the manifest beside its weights says of the ids of its heads."""
    try:
        layout = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["layout"]
        for path, heads in layout.items():
            net.get_submodule(path).headprune_ids = (
                tuple(heads["query_heads"]),
                tuple(heads["kv_heads"]),
            )
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return  # none of ours, or damaged: then verify says so


def with_restored_ids(attention: Attention) -> Attention:
    """Gives an attention module the ids that its model was told, if they fit."""
    ids = getattr(attention.module, "headprune_ids", None)
    if ids and tuple(map(len, ids)) == (attention.query_heads, attention.kv_heads):
        attention.query_ids, attention.kv_ids = ids
    return attention
